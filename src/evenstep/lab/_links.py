"""Network namespaces, the links between them, and what goes through: all that pyroute2 is for."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

from ._host import LabUnavailable

Result = TypeVar("Result")

_CLONE_NEWNET = 0x40000000
_MS_BIND = 4096
_MNT_DETACH = 2


@final
@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace by the file that holds it; ``nsenter --net=FILE`` goes there too.

    No process has to stay inside for it to last, so it outlives the process that made it.
    """

    path: Path

    def make(self) -> None:
        """Make an empty namespace. Nothing leads out of it.

        Raises:
            LabUnavailable: root is not allowed to here, in a container say.
            OSError: it exists, or the kernel has no namespaces.
        """
        os.close(os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o400))
        try:
            _in_a_thread(self._mount_a_new_one)
        except PermissionError as error:
            message = (
                "Root may not make network namespaces here, as in most containers. Start the "
                "container with `docker run --privileged`, or run on the machine itself."
            )
            raise LabUnavailable(message) from error

    def _mount_a_new_one(self) -> None:
        _call("unshare", _CLONE_NEWNET)
        # The thread's own: /proc/self is the main thread, which has not moved.
        mine = f"/proc/self/task/{threading.get_native_id()}/ns/net".encode()
        _call("mount", mine, os.fsencode(self.path), b"none", _MS_BIND, None)

    def run(self, function: Callable[[], Result]) -> Result:
        """Return what ``function`` returns inside: the sockets it opens are of this namespace.

        It runs in a thread of its own, as only threads can go elsewhere and leave the rest behind.
        """

        def inside() -> Result:
            with self.path.open("rb") as file:
                _call("setns", file.fileno(), _CLONE_NEWNET)
            return function()

        return _in_a_thread(inside)

    def processes(self) -> list[int]:
        """Return the processes inside, by number; this one is never among them."""
        here = self._identity()
        if here is None:
            return []
        numbers = (int(name) for name in os.listdir("/proc") if name.isdecimal())
        return [pid for pid in numbers if pid != os.getpid() and _network_of(pid) == here]

    def kill(self) -> int:
        """Kill the processes inside, one round of it, and return how many there were."""
        here, num_killed = self._identity(), 0
        for pid in self.processes():
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                # Asked again with the handle held: a number may have gone to another process.
                if _network_of(pid) == here:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    num_killed += 1
            except ProcessLookupError:
                continue
            finally:
                os.close(handle)
        return num_killed

    def remove(self) -> None:
        """Unmount and delete the file; the namespace goes with the last process inside."""
        if self._identity() is not None:
            _call("umount2", os.fsencode(self.path), _MNT_DETACH)
        self.path.unlink(missing_ok=True)

    def _identity(self) -> tuple[int, int] | None:
        """Return what distinguishes this namespace from others; None where the file holds none."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        mounted = found.st_dev != os.stat(self.path.parent).st_dev
        return (found.st_dev, found.st_ino) if mounted else None


def _network_of(pid: int) -> tuple[int, int] | None:
    try:
        found = os.stat(f"/proc/{pid}/ns/net")
    except OSError:  # it ended, or is ending
        return None
    return found.st_dev, found.st_ino


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 or sets an error."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_a_thread(function: Callable[[], Result]) -> Result:
    """Return or raise what ``function`` does in a fresh thread, which ends with it."""
    with ThreadPoolExecutor(1, thread_name_prefix="evenstep-lab") as thread:
        return thread.submit(function).result()


INTERFACE = "eth0"
"""What every host calls its link."""

_SWITCH = "switch"
_MTU = 1500
# A line has no burst; with less than this the bucket empties between two timers of a busy machine.
# Above a millisecond's worth, rates past 262 Mbit/s are kept too.
_BURST_BYTES, _BURST_S = 32768, 0.001
_QUEUE = "40ms"
_ROOT, _SHAPER, _DELAY = 0xFFFFFFFF, 0x00100000, 0x00010000
_OFFLOADS = (
    "tcp-segmentation-offload",
    "generic-segmentation-offload",
    "generic-receive-offload",
)


class Traffic(NamedTuple):
    """What a host's interface counted since the lab began, in bytes with all headers.

    Attributes:
        sent_bytes: what went out on its link.
        received_bytes: what came in.
    """

    sent_bytes: int
    received_bytes: int


def make_switch(switch: Namespace) -> None:
    """Make the bridge that all links end in. It has no address: no host can talk to it."""

    def inside() -> None:
        _no_ipv6()
        with _netlink() as route:
            # Without snooping it says nothing by itself that hosts would count.
            route.link("add", ifname=_SWITCH, kind="bridge", mtu=_MTU, br_mcast_snooping=0)
            route.link("set", index=_index(route, _SWITCH), state="up")

    switch.run(inside)


def connect(switch: Namespace, host: Namespace, *, port: str, address: str) -> None:
    """Lay a link from a host to the switch, without a route to anywhere else.

    Nothing of it is ever in the namespace of this process.

    Args:
        switch: has the bridge.
        host: an empty namespace.
        port: name of the switch's end.
        address: of the host's end, with the length of the network's part: "10.77.0.1/24".
    """

    def at_the_switch() -> None:
        with host.path.open("rb") as other, _netlink() as route:
            peer = {"ifname": INTERFACE, "net_ns_fd": other.fileno(), "mtu": _MTU}
            route.link("add", ifname=port, kind="veth", mtu=_MTU, peer=peer)
            bridge = _index(route, _SWITCH)
            route.link("set", index=_index(route, port), master=bridge, state="up")
        _offloads_off(port)

    def at_the_host() -> None:
        _no_ipv6()
        with _netlink() as route:
            number, _, length = address.partition("/")
            index = _index(route, INTERFACE)
            route.addr("add", index=index, address=number, prefixlen=int(length))
            for each in (index, _index(route, "lo")):
                route.link("set", index=each, state="up")
        _offloads_off(INTERFACE)

    switch.run(at_the_switch)
    host.run(at_the_host)


def set_delay(namespace: Namespace, interface: str, delay_ms: float) -> None:
    """Let everything that goes out wait. Once, before ``set_rate`` with ``delayed``.

    Raises:
        LabUnavailable: the kernel has no netem.
    """

    def change(route: Any, index: int) -> None:
        # More packets than any rate here sends in any delay worth asking for.
        route.tc("add", "netem", index, _DELAY, delay=round(1000 * delay_ms), limit=100_000)

    with _needing("netem", "`Lab(delay_ms=...)`", "leave the delay at 0"):
        _on(namespace, interface, change)


def set_rate(
    namespace: Namespace, interface: str, mbit: float | None, *, delayed: bool = False
) -> None:
    """Shape what goes out of an interface, from now on; None no longer does.

    A token bucket (tbf): packets leave at the rate on the average, after an idle time up to the
    burst at once, and queue for up to 40 ms before some are dropped. What queues stays queued,
    unless one of both rates is past 262 Mbit/s.

    Args:
        namespace: where the interface is.
        interface: its name.
        mbit: in Mbit/s.
        delayed: whether ``set_delay`` came before.

    Raises:
        LabUnavailable: the kernel has no tbf.
    """
    parent = _DELAY + 1 if delayed else _ROOT

    def change(route: Any, index: int) -> None:
        if mbit is None:
            route.tc("del", index=index, parent=parent)
            return
        before = _mbit(route, index)
        if before is not None and _burst(before) != _burst(mbit):
            # A bucket of another size, with packets in its queue, may stop for seconds
            # (Linux 6.18): then what queues is lost instead.
            route.tc("del", index=index, parent=parent)
        shape = {"rate": f"{round(mbit * 1e6)}bit", "burst": _burst(mbit), "latency": _QUEUE}
        route.tc("replace", "tbf", index, _SHAPER, parent=parent, **shape)

    with _needing("tbf", "`Host(mbit=...)`", "leave `mbit` out"):
        _on(namespace, interface, change)


@contextmanager
def _needing(kind: str, argument: str, otherwise: str) -> Iterator[None]:
    """Say what is missing where the kernel does not know a kind of queue."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        message = (
            f"{argument} needs {kind}, and this kernel has none. Load it with `modprobe "
            f"sch_{kind}`, take a kernel with CONFIG_NET_SCH_{kind.upper()}, or {otherwise}."
        )
        raise LabUnavailable(message) from error


def _burst(mbit: float) -> int:
    """Return the bytes of a bucket."""
    return max(_BURST_BYTES, round(mbit * 1e6 / 8 * _BURST_S))


def _mbit(route: Any, index: int) -> float | None:
    """Return the rate that an interface is shaped to."""
    for qdisc in route.get_qdiscs(index=index):
        if qdisc.get_attr("TCA_KIND") == "tbf":
            parameters = qdisc.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")
            return float(parameters["rate"] * 8e-6)
    return None


def traffic(namespace: Namespace, interface: str) -> Traffic:
    """Return what an interface counted so far."""

    def read(route: Any, index: int) -> Traffic:
        (link,) = route.get_links(index)
        counted = link.get_attr("IFLA_STATS64")
        return Traffic(counted["tx_bytes"], counted["rx_bytes"])

    return _on(namespace, interface, read)


def _on(namespace: Namespace, interface: str, act: Callable[[Any, int], Result]) -> Result:
    """Return what ``act`` does with the number of an interface; errors are plain OSErrors."""

    def inside() -> Result:
        with _netlink() as route:
            return act(route, _index(route, interface))

    return namespace.run(inside)


@contextmanager
def _netlink() -> Iterator[Any]:
    """Open a connection to the kernel, in the namespace of this thread."""
    from pyroute2 import IPRoute, NetlinkError

    try:
        with IPRoute() as route:
            yield route
    except NetlinkError as error:
        raise OSError(error.code, f"netlink: {error}") from error


def _index(route: Any, interface: str) -> int:
    (index,) = route.link_lookup(ifname=interface)
    return int(index)


def _offloads_off(interface: str) -> None:
    """Send packets one by one: a bundle of 64 KiB would pass a bucket, and a counter, as one."""
    from pyroute2.ethtool.ioctl import IoctlEthtool

    settings = IoctlEthtool(interface)
    try:
        for name in _OFFLOADS:
            settings.set_offload_flag(name, 0)
    finally:
        settings.close()


def _no_ipv6() -> None:
    """Leave out IPv6's own chatter, which would be counted. Where it cannot be, it is a little."""
    with suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1", encoding="ascii")
