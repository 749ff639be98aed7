"""What connects the ranks from ``prepare`` on: who runs where, and the exchange between them."""

from __future__ import annotations

from typing import final

import torch

from .._exchange._exchange import Exchange
from .._run._open_channel import open_channel
from ..events import Event, Hook
from ._exchange._crew import Crew
from ._exchange._sockets import break_off, ports_of_store
from ._exchange._startup import WorkerFacts, addresses_of, gather_facts
from ._exchange._stuck import TORCH
from ._options import Runtime


@final
class Connection:
    """Connects this rank with the others. Collective: all ranks make one together.

    From then on nothing that starts a step is a collective, so that any thread may read the loader,
    and the loss of a rank has a name before the first step too.

    Args:
        crew: all ranks.
        device: where this rank computes.
        runtime: heartbeats and deadlines.

    Attributes:
        facts: of every rank, servers last.
        lag: steps by which a plan trails its measurement.
        exchange: open, without a planner.
    """

    def __init__(self, crew: Crew, device: torch.device, runtime: Runtime) -> None:
        late = device.type != "cpu" and runtime.freshness == "newest"
        self.facts = gather_facts(crew, WorkerFacts.here(device, lag=int(late)))
        self.lag = max(worker.lag for worker in self.facts[: crew.num_workers])
        self._emit: Hook | None = None
        self.exchange = Exchange(
            crew.side.rank,
            crew.hosts(self.facts),
            open_channel(crew, runtime, addresses_of(self.facts)),
            framework=TORCH,
            lag=self.lag,
            num_servers=crew.num_servers,
            emit=self._pass_on,
            heartbeat_s=runtime.heartbeat_s,
            hang_s=runtime.hang_s,
            grace_s=3 * runtime.heartbeat_s,
            release=self._release,
        )
        self.exchange.start()
        crew.watch_by(self.exchange)

    def emit_to(self, emit: Hook) -> None:
        """Have events taken from now on: those before the run is open are only logged."""
        self._emit = emit

    def _release(self) -> None:
        """Have threads that wait in a collective of gloo's come out of it."""
        addresses = {address for worker in self.facts for address in worker.addresses}
        break_off(addresses, spared_ports=ports_of_store())

    def _pass_on(self, event: Event) -> None:
        if self._emit is not None:
            self._emit(event)
