"""What ranks tell each other, through the store they met at; each wait is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Protocol, final

import torch.distributed as dist

from ..exceptions import invalid

_POLL_S = 0.02


class KeyStore(Protocol):
    """Where texts are kept by name: any of torch's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Keep ``value`` as ``key``."""

    def get(self, key: str, /) -> bytes:
        """Return what is kept as ``key``."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all of ``keys`` are there."""


@final
class Desk:
    """Leaves and fetches texts by topic and rank.

    Args:
        store: what all ranks share.
        rank: the own one.
        world_size: how many there are.
        clock, sleep: of this process.
    """

    def __init__(
        self,
        store: KeyStore,
        rank: int,
        world_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._clock, self._sleep = store, clock, sleep

    def leave(self, topic: str, text: str) -> None:
        """Have the others find ``text`` under this topic and the own rank."""
        self._store.set(_key(topic, self.rank), text)

    def fetch(
        self,
        topic: str,
        ranks: Iterable[int],
        within_s: float,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, str]:
        """Return what ranks left, by rank; those that left nothing in time are missing.

        ``meanwhile`` is called again and again while others are waited for.
        """
        waiting = {rank: _key(topic, rank) for rank in ranks}
        until_s = self._clock() + within_s
        # All at once: a question for each would be many for a large cluster.
        while waiting and not self._store.check(list(waiting.values())):
            if self._clock() >= until_s:
                break
            if meanwhile is not None:
                meanwhile()
            self._sleep(_POLL_S)
        there = (rank for rank, key in waiting.items() if self._store.check([key]))
        return {rank: self._store.get(waiting[rank]).decode() for rank in there}

    def wait(self, topic: str, within_s: float) -> str | None:
        """Return what rank 0 left; None if there is nothing in time."""
        return self.fetch(topic, [0], within_s).get(0)


def open_desk(environ: Mapping[str, str], *, timeout_s: float) -> Desk:
    """Return the desk of this rank: torchrun's store, or one of its own where it is alone.

    Args:
        environ: as torchrun sets it; without ``RANK`` there is one rank.
        timeout_s: how long to try to reach the store.

    Raises:
        ValueError: the environment has a rank and lacks the rest.
        RuntimeError: the store cannot be reached.
    """
    if "RANK" not in environ:
        return Desk(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        rule = "have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or no RANK"
        remedy = "Start it by `torchrun --nproc-per-node 2 -m evenstep.doctor`."
        raise invalid("environment of evenstep.doctor", rule, error, remedy) from error
    is_agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        world_size,
        is_master=rank == 0 and not is_agents,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,  # those who do not come are to be named
        multi_tenant=True,
    )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"evenstep-doctor-{attempt}", store)  # type: ignore[attr-defined]
    return Desk(own, rank, world_size)


def _key(topic: str, rank: int) -> str:
    return f"{topic}/{rank}"
