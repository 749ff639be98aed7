"""Facts of the machine under a rank, read from its files, and of its links, by one connection."""

from __future__ import annotations

import hmac
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, final

from .._exchange._meeting import interface_address, loopback
from .._host import Cgroups, available_bytes, contents
from ._checkup_facts import CpuFacts, LinkSpeed, NetworkFacts, RoomFacts
from ._judge_machines import SLOWING

Pair = tuple[int, int]
"""Receiver and sender."""


Turn = tuple[Pair, ...]
"""Pairs that measure at the same time; no host is in two of them."""


def schedule(
    hosts: Sequence[Sequence[int]], *, turn_s: float, budget_s: float
) -> tuple[tuple[Turn, ...], int]:
    """Return the turns in which links are measured, and how many pairs of hosts have no time.

    They are for the first rank of every host, and for two ranks of each host.

    Ranks of one host share its link, so one of them measures it. Pairs go one by one as long as
    that fits into ``budget_s``: no measurement disturbs another. Else all hosts measure at once in
    pairs, as in a tournament in which each meets each (the circle method); and where even that
    takes too long, in as many of its rounds as there is time for. Each host has met some others
    then.

    Args:
        hosts: ranks of each host, none empty.
        turn_s: what one turn takes.
        budget_s: what all may take; there is one round at least.
    """
    most = max(2, int(budget_s / turn_s))
    inside = [(ranks[0], ranks[1]) for ranks in hosts if len(ranks) > 1]
    first = [ranks[0] for ranks in hosts]
    rounds = _tournament(first)
    pairs = sum(map(len, rounds))
    if 2 * (pairs + len(inside)) <= most:
        one_by_one = [*((pair,) for pair in inside), *((p,) for each in rounds for p in each)]
        return _both_ways(one_by_one), 0
    within = [tuple(inside)] if inside else []
    kept = rounds[: max(1, most // 2 - len(within))]
    return _both_ways([*within, *kept]), pairs - sum(map(len, kept))


def _tournament(players: Sequence[int]) -> list[Turn]:
    """Return rounds in which each meets each once; no rank is in two pairs of a round."""
    ring: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    half, rounds = len(ring) // 2, []
    for _ in range(len(ring) - 1):
        drawn = zip(ring[:half], reversed(ring[half:]), strict=True)
        pairs = [(a, b) for a, b in drawn if a is not None and b is not None]
        if pairs:
            rounds.append(tuple((min(pair), max(pair)) for pair in pairs))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _both_ways(rounds: Sequence[Turn]) -> tuple[Turn, ...]:
    return tuple(turn for pairs in rounds for turn in (pairs, tuple((b, a) for a, b in pairs)))


CONNECT_S = 2.0
SETTLE_S = 0.15
"""Bytes of the start are not counted: windows grow, and a shaped link lets a burst through."""
FLOW_S = 0.6
PINGS, PINGS_S = 40, 0.3
TURN_S = SETTLE_S + FLOW_S + PINGS_S
"""What a measurement takes at most, once connected."""
_BLOCK = 1 << 20
_SMALL = 64
_MOST_AT_ONCE = 16


@final
class LinkServer:
    """Answers the others' measurements, from ``with`` to its end.

    A connection without the token is not answered.

    Args:
        token: what all ranks know.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._room = threading.Semaphore(_MOST_AT_ONCE)

    def __enter__(self) -> Self:
        if socket.has_dualstack_ipv6():
            self._listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            self._listener = socket.create_server(("", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves `accept` waiting
        self._listener.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                connection.settimeout(CONNECT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hmac.compare_digest(_exactly(connection, len(self._token)), self._token):
                    _answer(connection)
        finally:
            self._room.release()


def measure_link(receiver: int, sender: int, address: tuple[str, int], token: str) -> LinkSpeed:
    """Return what comes from ``sender``, and how long a small message takes there and back.

    Args:
        receiver: this rank.
        sender: the other one.
        address: where its ``LinkServer`` listens.
        token: what that was given.
    """
    try:
        with socket.create_connection(address, CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token.encode())
            round_trip_s = _round_trip_s(connection)
            connection.sendall(b"F" * _SMALL)
            return LinkSpeed(receiver, sender, _rate(connection), round_trip_s)
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return LinkSpeed(receiver, sender, 0.0, 0.0, reason)


def _answer(connection: socket.socket) -> None:
    """Send small messages back; at the first that asks for it, send all there is."""
    while True:
        asked = _exactly(connection, _SMALL)
        if asked[:1] == b"F":
            break
        connection.sendall(asked)
    block, until_s = bytes(_BLOCK), time.monotonic() + SETTLE_S + FLOW_S + CONNECT_S
    while time.monotonic() < until_s:
        connection.sendall(block)  # ends with an error when the receiver has enough


def _round_trip_s(connection: socket.socket) -> float:
    took_s: list[float] = []
    until_s = time.perf_counter() + PINGS_S
    while len(took_s) < PINGS and (began_s := time.perf_counter()) < until_s:
        connection.sendall(b"P" * _SMALL)
        _exactly(connection, _SMALL)
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


def _rate(connection: socket.socket) -> float:
    """Return bytes per second, after the start."""
    buffer = bytearray(_BLOCK)
    began_s = from_s = now_s = time.perf_counter()
    counted = 0
    while now_s - began_s < SETTLE_S + FLOW_S:
        number = connection.recv_into(buffer)
        now_s = time.perf_counter()
        if number == 0:
            raise ConnectionError("the connection was closed")
        if now_s - began_s < SETTLE_S:
            from_s = now_s
        else:
            counted += number
    return counted / (now_s - from_s)


def _exactly(connection: socket.socket, number: int) -> bytes:
    """Return so many bytes.

    Raises:
        ConnectionError: it was closed before.
    """
    found = b""
    while len(found) < number:
        part = connection.recv(number - len(found))
        if not part:
            raise ConnectionError("the connection was closed")
        found += part
    return found


VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("CUDA_VISIBLE_DEVICES", *SLOWING),
)
"""What is read of the environment."""


def read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change a rank's speed, as far as they are set."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def read_cpu(num_threads: int, groups: Cgroups, root: Path = Path("/")) -> CpuFacts:
    """Return the cores of the machine, and what this process may use of them.

    Args:
        num_threads: that arithmetic uses.
        groups: of the process.
        root: of the file system that is read.
    """
    number = os.cpu_count() or 1
    has = hasattr(os, "sched_getaffinity")
    affinity = sorted(os.sched_getaffinity(0)) if has else list(range(number))
    quota_cores, quota_file = groups.quota() or (None, None)
    folder = root / f"sys/devices/system/cpu/cpu{affinity[0]}/cpufreq"
    return CpuFacts(
        num_cores=number,
        affinity=tuple(affinity),
        num_threads=num_threads,
        quota_cores=quota_cores,
        quota_file="" if quota_file is None else f"/{quota_file.relative_to(root)}",
        governor=_text(folder / "scaling_governor"),
        governor_driver=_text(folder / "scaling_driver"),
        pressure=_pressure(root / "proc/pressure/cpu"),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
    )


def read_room(groups: Cgroups, root: Path = Path("/")) -> RoomFacts:
    """Return memory and limits of files.

    Args:
        groups: of the process.
        root: of the file system that is read.
    """
    left = [available_bytes(root), groups.free_bytes()]
    known = [number for number in left if number is not None]
    shared = None
    with suppress(OSError, AttributeError):
        size = os.statvfs(root / "dev/shm")
        shared = size.f_frsize * size.f_blocks or None
    soft, hard = _open_files()
    return RoomFacts(
        available_bytes=min(known, default=None),
        memory_pressure=_pressure(root / "proc/pressure/memory"),
        shared_bytes=shared,
        open_files=soft,
        open_files_ceiling=hard,
    )


def read_network(
    environ: Mapping[str, str], leader: str, root: Path = Path("/"), port: int = 0
) -> NetworkFacts:
    """Return how others reach this rank: as gloo does, else by the way to the leader.

    Args:
        environ: environment of the process.
        leader: address of rank 0's host.
        root: of the file system that is read.
        port: where this rank listens.
    """
    chosen = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    resolved = ""
    with suppress(OSError):
        resolved = str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    address = (interface_address(chosen) if chosen else None) or resolved
    if not address or address.startswith("127.") or address == "::1":
        address = _towards(leader) or address or loopback()
    return NetworkFacts(resolved, chosen, _interfaces(root), address, port)


def gpus_of_driver(root: Path = Path("/")) -> int:
    """Return how many cards NVIDIA's driver has, whether torch sees them or not."""
    return len(list(root.glob("proc/driver/nvidia/gpus/*")))


def _interfaces(root: Path) -> dict[str, int] | None:
    """Return Mbit/s of interfaces with an address; None where they cannot be listed.

    A bridge, such as Docker's, and a tunnel have 0: what the kernel says there is no link's rate.
    """
    folder = root / "sys/class/net"
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return None
    found = {}
    for name in names:
        if name == "lo" or interface_address(name) is None:
            continue
        if any((folder / name / file).exists() for file in ("bridge", "tun_flags")):
            found[name] = 0
            continue
        with suppress(ValueError):
            found[name] = max(0, int(_text(folder / name / "speed") or 0))
    return found


def _towards(leader: str) -> str:
    """Return the own address on the way to ``leader``. Nothing is sent."""
    with suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(leader, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""


def _open_files() -> tuple[int | None, int | None]:
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    return (None if soft == endless else soft), (None if hard == endless else hard)


def _pressure(file: Path) -> float | None:
    """Return the part of the last minute in which something waited, in [0, 1]."""
    found = re.search(r"^some .*avg60=(\d+\.\d+)", _text(file), re.M)
    return float(found[1]) / 100 if found else None


def _text(file: Path) -> str:
    return contents(file).decode("ascii", "replace").strip()
