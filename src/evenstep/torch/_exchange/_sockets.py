"""The connections of process groups, broken off so that who waits in a collective comes out.

Gloo waits half an hour for a peer that was stopped, and its ``abort()`` wakes no
thread. Shutting down its TCP connections does, at once, wherever the thread is: inside an
all-reduce, a barrier of the user's, a backward hook. The collective raises, and the script
continues to its own ``finally``.

Nothing in torch says which connections are gloo's, so they are found by where they lead. Of the
connections of this process, gloo's go to an address of a rank, are no socket object of Python's,
and do not lead to the store. A connection of the user's own that is all of that as well would be
broken off too; that is done only to end a run in which a rank was lost. Ray's connections are of
that kind, and carry what its workers raise: inside of Ray nothing is broken off.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..._host import connections
from ..._private_torch import default_store


def own_addresses() -> list[str]:
    """Return the addresses at which this process is connected: ranks reach each other by them."""
    return sorted({connection.here for connection in connections()})


def break_off(addresses: Collection[str], *, spared_ports: Collection[int]) -> int:
    """Shut down the connections to other ranks that no socket object of Python's stands for.

    Args:
        addresses: of all ranks.
        spared_ports: connections from or to these stay, such as the store's.

    Returns:
        How many there were.
    """
    if "ray" in sys.modules:
        return 0
    spared, known = frozenset(spared_ports), _descriptors_of_python()
    count = 0
    for one in connections():
        if one.there in addresses and one.descriptor not in known and spared.isdisjoint(one.ports):
            with suppress(OSError), socket.socket(fileno=os.dup(one.descriptor)) as again:
                again.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def ports_of_store() -> set[int]:
    """Return the ports of the store by which the process group was made, as far as known."""
    ports = {int(port)} if (port := os.environ.get("MASTER_PORT", "")).isdigit() else set()
    store: Any = default_store() if dist.is_initialized() else None
    while store is not None and not hasattr(store, "port"):
        store = getattr(store, "underlying_store", None)  # behind prefixes
    return ports if store is None else ports | {int(store.port)}


def _descriptors_of_python() -> set[int]:
    found = set()
    for one in gc.get_objects():
        if issubclass(type(one), socket.socket):  # `isinstance` would ask objects for their class
            with suppress(OSError):
                found.add(one.fileno())
    return found
