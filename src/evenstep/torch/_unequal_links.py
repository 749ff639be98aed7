"""The door to ``evenstep.network``, never opened without ``Balancer(network=...)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._exchange._channel import StarChannel
from .._exchange._progress import COMPILING_TIMES
from .._run._runtime import open_channel
from ..exceptions import invalid
from ._exchange._crew import ROLE, Crew
from ._exchange._side_group import gloo_group
from ._exchange._startup import TORCH, WorkerFacts, addresses_of, gather_facts
from ._options import Runtime

if TYPE_CHECKING:
    from ..network._torch._network_settings import Network
    from ..network._torch._reduction import Reduction
    from ..network._torch._serving import Service

_FOR_EVER_S = 3e7


def checked_network(network: Any) -> Network | None:
    """Return how gradients are summed, if it is said as it has to be."""
    if network is None:
        return None
    from ..network._torch._network_settings import Network

    if not isinstance(network, Network):
        raise invalid(
            "Balancer(network=...)",
            "be a `Network`, or None",
            repr(network),
            "Give `Network()` for shares that follow the links, or leave it out.",
        )
    return network


def open_reduction(network: Network, crew: Crew, runtime: Runtime) -> Reduction:
    """Return what sums this rank's share of the gradients. Collective: all ranks open one.

    Args:
        network: what the user asked for.
        crew: all ranks, servers among them.
        runtime: says how long a rank may keep others waiting.

    Raises:
        ValueError: only servers should sum, and there are none.
    """
    from ..network._torch._reduction import Reduction

    if network.only_servers and crew.num_servers == 0:
        rule, got = "be given where some ranks hold no data", "all ranks as workers"
        remedy = f"Name them in `Network(servers=...)`, or set {ROLE}=server in their environment."
        raise invalid("Network(only_servers=...)", rule, got, remedy)
    reduction = Reduction(
        network,
        gloo_group(crew.all),
        order=crew.order,
        num_workers=crew.num_workers,
        timeout_s=timeout_s(runtime),
    )
    reduction.reducer.start()
    return reduction


def service_of(crew: Crew, runtime: Runtime) -> Service:
    """Return what a server does in place of training.

    Args:
        crew: all ranks.
        runtime: heartbeats and deadlines.
    """
    from ..network._torch._serving import Service

    def meet() -> tuple[list[str], StarChannel]:
        facts = gather_facts(crew, WorkerFacts.here(torch.device("cpu"), lag=0))
        channel = open_channel(crew, runtime, addresses_of(facts))
        assert channel is not None, "a server has workers beside it"
        return crew.hosts(facts), channel

    return Service(
        meet,
        watch_by=crew.watch_by,
        framework=TORCH,
        grace_s=3 * runtime.heartbeat_s,
    )


def timeout_s(runtime: Runtime) -> float:
    """Return after how long a wait is in vain, where those who watch the steps say nothing."""
    if runtime.hang_s is None:
        return _FOR_EVER_S
    return COMPILING_TIMES * runtime.hang_s + runtime.deadline_s
