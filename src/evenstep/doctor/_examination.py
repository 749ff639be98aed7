"""One rank's part of a checkup: facts, links in turn, timed steps; rank 0 leads, by the store."""

from __future__ import annotations

import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from msgspec import MsgspecError
from msgspec.json import decode, encode

from .._doctor import (
    TURN_S,
    Checkup,
    Device,
    LinkServer,
    LinkSpeed,
    Pace,
    RankFacts,
    gpus_of_driver,
    measure_link,
    read_cpu,
    read_network,
    read_room,
    read_variables,
    schedule,
)
from .._exchange._threads import network_name
from .._host import Cgroups, contents
from .._telemetry import versions_here
from ..exceptions import invalid
from ._timed_step import BUDGET_S, REFERENCE, Step, load_step, reference, sizes_for, time_steps

_POLL_S = 0.02


@final
class StoreChannel:
    """Leaves and fetches texts by topic and rank.

    Args:
        store: what all ranks share, any of torch's.
        rank: the own one.
        world_size: how many there are.
        clock, sleep: of this process.
    """

    def __init__(
        self,
        store: dist.Store,  # type: ignore[name-defined]
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
        self._store.set(f"{topic}/{self.rank}", text)

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
        waiting = {rank: f"{topic}/{rank}" for rank in ranks}
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


def open_desk(environ: Mapping[str, str], *, timeout_s: float) -> StoreChannel:
    """Return the desk of this rank: torchrun's store, or one of its own where it is alone.

    Args:
        environ: as torchrun sets it; without ``RANK`` there is one rank.
        timeout_s: how long to try to reach the store.

    Raises:
        ValueError: the environment has a rank and lacks the rest.
        RuntimeError: the store cannot be reached.
    """
    if "RANK" not in environ:
        return StoreChannel(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
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
    return StoreChannel(own, rank, world_size)


def facts_of(rank: int, device: torch.device, groups: Cgroups, *, port: int) -> RankFacts:
    """Return all that this rank says of itself.

    Args:
        rank: the own one.
        device: what it computes on.
        groups: of its process.
        port: where it listens while links are measured.
    """
    return RankFacts(
        rank=rank,
        host=platform.node(),
        machine=network_name(),
        versions=_versions(device),
        device=_described(device),
        cpu=read_cpu(torch.get_num_threads(), groups),
        room=read_room(groups),
        network=read_network(os.environ, os.environ.get("MASTER_ADDR", "localhost"), port=port),
        variables=read_variables(os.environ),
        unused_gpus=0 if torch.cuda.is_available() else gpus_of_driver(),
    )


def _versions(device: torch.device) -> dict[str, str]:
    found = dict(text.split(" ", 1) for text in versions_here())
    if device.type == "cuda":
        found["CUDA"] = torch.version.cuda or "none"
        if torch.distributed.is_nccl_available():
            nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            found["NCCL"] = ".".join(map(str, nccl))
    return found


def _described(device: torch.device) -> Device:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return Device("cuda", str(found.name), str(getattr(found, "uuid", "")))
    known = contents("/proc/cpuinfo").decode("utf-8", "replace")
    model = re.search(r"^model name\s*:\s*(.+)$", known, re.M)
    return Device("cpu", model[1] if model else platform.machine())


SAMPLES_PER_RANK = {"cpu": 32, "cuda": 512}
GO, SKIP = "go", "skip"
_QUIET_S = 2.0  # nothing is said of what is over by then
FAREWELL_S = 5.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for each other, in seconds.

    Attributes:
        arrive_s: until all have sent their facts.
        links_s: what measuring links may take in all.
        turn_s: one turn of it, with a connection that does not come about.
        timing_s: for which steps are timed.
        steps_s: until all have timed their steps, beyond that.
    """

    arrive_s: float = 60.0
    links_s: float = 20.0
    turn_s: float = TURN_S + 5.0
    timing_s: float = BUDGET_S
    steps_s: float = 60.0

    @property
    def all_s(self) -> float:
        """What a rank waits for rank 0 to get through everything."""
        return self.arrive_s + 2 * self.links_s + self.turn_s + self.timing_s + self.steps_s


@dataclass(frozen=True, slots=True)
class DoctorOrders:
    """What rank 0 sends all before links are measured.

    Attributes:
        ranks: those that take part.
        addresses: host and port of each of them.
        turns: pairs of receiver and sender, several in a turn.
        sizes: samples of the steps that are timed.
    """

    ranks: tuple[int, ...]
    addresses: dict[int, tuple[str, int]]
    turns: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[int, ...]


def examine(
    desk: StoreChannel,
    line: StageLine,
    *,
    step: str | None = None,
    global_batch_size: int | None = None,
    patience: Patience = Patience(),  # frozen
) -> Checkup | None:
    """Return what was found on rank 0, None on the others. All ranks call it.

    Args:
        desk: through which they talk.
        line: where rank 0 says how far it is.
        step: the user's own step, as ``load_step`` takes it; None is the reference.
        global_batch_size: samples per step; None is 32 for each rank, 512 if all have cards.
        patience: how long to wait for others.

    Raises:
        RuntimeError: rank 0 did not answer, or gave this rank up.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():  # the card of its number, as in most scripts
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)  # steps are waited for on the current one
    groups = Cgroups.find()
    _, quota_file = groups.quota() or (None, None)
    counts = None if quota_file is None else quota_file.with_name("cpu.stat")
    load = partial(reference, device) if step is None else partial(load_step, step)
    if desk.rank == 0:
        desk.leave("token", secrets.token_hex(16))
    token = desk.wait("token", patience.arrive_s)
    if token is None:
        raise RuntimeError(f"Rank 0 was not heard within {patience.arrive_s:g} s.")
    with LinkServer(token) as server:
        facts = facts_of(desk.rank, device, groups, port=server.port)
        desk.leave("facts", encode(facts).decode())
        rank = _Rank(desk, counts, token, load, patience, line)
        if desk.rank:
            rank.follow()
            return None
        return rank.lead(global_batch_size, REFERENCE if step is None else step)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's own measurements; rank 0 gives the word for each part, and gathers what comes."""

    desk: StoreChannel
    counts: Path | None
    token: str
    load: Callable[[], Step]
    patience: Patience
    line: StageLine

    def follow(self) -> None:
        """Take part until rank 0 says that it is over."""
        orders = decode(self._received("orders"), type=DoctorOrders)
        if self.desk.rank not in orders.ranks:
            raise RuntimeError(
                f"Rank {self.desk.rank} came too late: the others began after "
                f"{self.patience.arrive_s:g} s."
            )
        for at, turn in enumerate(orders.turns):
            mine = [pair for pair in turn if pair[0] == self.desk.rank]
            if mine and self._received(f"turn-{at}") == GO:
                self._measure(at, mine, orders)
        self._received("steps")
        self._time(orders)
        self._received("end")
        self.desk.leave("bye", "")

    def lead(self, given: int | None, workload: str) -> Checkup:
        """Return what all ranks said and measured; the rest continues without those that do not."""
        desk, patience = self.desk, self.patience
        sent = desk.fetch(
            *("facts", range(desk.world_size), patience.arrive_s),
            meanwhile=partial(self.line.say, "waiting for all ranks"),
        )
        ranks: list[RankFacts] = []
        for rank in sorted(sent):
            with suppress(MsgspecError):  # its evenstep is too far from this one
                ranks.append(decode(sent[rank], type=RankFacts))
        kinds = {facts.device.kind for facts in ranks}
        each = SAMPLES_PER_RANK["cuda" if kinds == {"cuda"} else "cpu"]
        global_batch_size = given or each * desk.world_size
        checkup = Checkup(desk.world_size, global_batch_size, workload, tuple(ranks))
        hosts = [[facts.rank for facts in group] for group in checkup.machines.values()]
        turns, num_skipped = schedule(hosts, turn_s=TURN_S, budget_s=patience.links_s)
        orders = DoctorOrders(
            ranks=tuple(facts.rank for facts in ranks),
            addresses={f.rank: (f.network.address, f.network.port) for f in ranks},
            turns=turns,
            sizes=sizes_for(global_batch_size, desk.world_size),
        )
        desk.leave("orders", encode(orders).decode())
        links = self._links(orders)
        paces = self._paces(orders)
        desk.leave("end", "")
        others = [pace.rank for pace in paces if pace.rank and pace.seconds]
        desk.fetch("bye", others, FAREWELL_S)  # this process may hold the store
        planned = {frozenset(pair) for turn in turns for pair in turn}
        measured = {frozenset((link.receiver, link.sender)) for link in links}
        num_skipped += len(planned - measured)
        return replace(checkup, links=links, paces=paces, skipped_pairs=num_skipped)

    def _measure(self, at: int, pairs: Iterable[tuple[int, int]], orders: DoctorOrders) -> None:
        """Measure what comes from others in one turn."""
        for receiver, sender in pairs:
            link = measure_link(receiver, sender, orders.addresses[sender], self.token)
            self.desk.leave(f"link-{at}", encode(link).decode())

    def _time(self, orders: DoctorOrders) -> None:
        budget_s = self.patience.timing_s
        pace = time_steps(self.desk.rank, self.load, orders.sizes, self.counts, budget_s=budget_s)
        self.desk.leave("pace", encode(pace).decode())

    def _received(self, topic: str) -> str:
        sent = self.desk.wait(topic, self.patience.all_s)
        if sent is None:
            raise RuntimeError(f"Rank 0 did not go on to `{topic}`: it may have ended.")
        return sent

    def _links(self, orders: DoctorOrders) -> tuple[LinkSpeed, ...]:
        found: list[LinkSpeed] = []
        silent: set[int] = set()
        until_s = time.monotonic() + 1.5 * self.patience.links_s  # dead links take longer
        for at, turn in enumerate(orders.turns):
            self.line.say("measuring links")
            if time.monotonic() > until_s:
                self.desk.leave(f"turn-{at}", SKIP)
                continue
            awaited = {pair[0]: pair[1] for pair in turn if pair[0] not in silent}
            self.desk.leave(f"turn-{at}", GO)
            self._measure(at, [pair for pair in turn if pair[0] == 0], orders)
            sent = self.desk.fetch(f"link-{at}", awaited, self.patience.turn_s)
            for receiver, sender in awaited.items():
                if receiver in sent:
                    found.append(decode(sent[receiver], type=LinkSpeed))
                else:
                    silent.add(receiver)
                    found.append(LinkSpeed(receiver, sender, 0.0, 0.0, "it stopped answering"))
        return tuple(found)

    def _paces(self, orders: DoctorOrders) -> tuple[Pace, ...]:
        self.line.say(f"timing steps, {self.patience.timing_s:g} s")
        self.desk.leave("steps", "")
        self._time(orders)
        within_s = self.patience.steps_s
        sent = self.desk.fetch("pace", orders.ranks, within_s)
        late = f"no times {within_s:g} s after rank 0 had its own"
        return tuple(
            decode(sent[rank], type=Pace) if rank in sent else Pace(rank, (), (), 0.0, late)
            for rank in orders.ranks
        )


@final
class StageLine:
    """Says what is being done on standard error, from two seconds on.

    Args:
        shows: whether anything is said at all: one rank speaks for all.
        clock: in seconds.
    """

    def __init__(self, shows: bool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._shows, self._stage, self._clock = shows, "", clock
        self._from_s = clock() + _QUIET_S

    def say(self, stage: str) -> None:
        """Name the stage, once."""
        if self._shows and stage != self._stage and self._clock() >= self._from_s:
            self._stage = stage
            print(f"evenstep doctor: {stage}", file=sys.stderr, flush=True)
