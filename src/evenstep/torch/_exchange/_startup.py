"""Once at the start: who runs where, and by which addresses rank 0 is reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch

from ..._exchange._meeting import loopback
from ..._exchange._threads import network_name
from ..._run._open_channel import AllRanks
from ._sockets import own_addresses


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the others should know about a worker.

    Attributes:
        host: its host name.
        device: its device, such as ``"cpu"`` or ``"cuda:0 NVIDIA H200"``.
        lag: steps by which its measurements trail, 0 or 1.
        identity: host and device, as they go by through restarts: ranks are renumbered, and every
            process may call its own card ``"cuda:0"``.
        addresses: at which it is connected to other ranks.
        network: equal for those that reach each other by the loopback.
    """

    host: str
    device: str
    lag: int
    identity: str
    addresses: tuple[str, ...] = ()
    network: str = ""

    @classmethod
    def here(cls, device: torch.device, *, lag: int) -> WorkerFacts:
        """Return the facts of this process."""
        host = socket.gethostname()
        identity = f"{host} {_identity(device)}"
        addresses = tuple(own_addresses())
        return cls(
            host,
            describe_device(device),
            lag,
            identity,
            addresses=addresses,
            network=network_name(),
        )


def gather_facts(ranks: AllRanks, mine: WorkerFacts) -> list[WorkerFacts]:
    """Return the facts of all ranks, in order."""
    return [WorkerFacts(*row) for row in ranks.collect(astuple(mine))]


def describe_device(device: torch.device) -> str:
    """Return the device with its model's name, where it has one."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)


def _identity(device: torch.device) -> str:
    """Return a name of the device that no other on its host has, where one is known."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    return device.type


def addresses_of(facts: list[WorkerFacts]) -> list[str]:
    """Return addresses of this host, or one of its interfaces, best first.

    ``GLOO_SOCKET_IFNAME`` names the interfaces that gloo connects by, with commas in between; this
    one connection goes by the first. ``MASTER_ADDR`` is set by every launcher to a name of rank
    0's host that all can resolve.
    """
    if len({worker.network for worker in facts}) == 1:
        return [loopback()]
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip():
        return [interface]
    name = socket.gethostname()
    found = [os.environ.get("MASTER_ADDR", ""), *_quietly(lambda: [socket.getfqdn(), name])]
    found += _quietly(lambda: socket.gethostbyname_ex(name)[2])
    return list(dict.fromkeys(address for address in found if address))


def _quietly(resolve: Callable[[], list[str]]) -> list[str]:
    try:
        return resolve()
    except OSError:
        return []  # a host that cannot resolve its own name has others still
