"""Where rank 0 listens: no wider than the ranks need it, and at a port that may be given."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from time import monotonic, sleep

_RETRY_S = 0.2


def loopback() -> str:
    """Return the address by which this host reaches itself: IPv6's where it has no other."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError:
        return "::1"
    return "127.0.0.1"


def listen(
    addresses: Sequence[str], ports: Sequence[int], *, backlog: int, timeout_s: float
) -> socket.socket:
    """Return a socket that listens, for the caller to close.

    Where all ranks know rank 0 by one address of this host, it listens there alone; else at all
    of its addresses, by IPv6 as well as by IPv4.

    Args:
        addresses: host names or addresses by which the ranks try to reach rank 0.
        ports: to take the first free one of; 0 is any.
        backlog: connections that may wait to be accepted.
        timeout_s: how long to try while all of the ports are in use.

    Raises:
        ConnectionError: none of the ports can be listened at.
    """
    where = _only_address(addresses)
    deadline_s = monotonic() + timeout_s
    while True:
        for port in ports:
            try:
                return _bound(where, port, backlog)
            except OSError as error:
                problem = error
        if problem.errno != errno.EADDRINUSE or monotonic() > deadline_s:
            raise ConnectionError(
                f"`Runtime(ports=...)` must have a port that rank 0 can listen at, got "
                f"{_in_words(ports)}: {problem.strerror}. Give another one, or a range such as "
                f"`range(29600, 29700)`."
            ) from problem
        sleep(_RETRY_S)


def interface_address(name: str) -> str | None:
    """Return the address of a network interface of this host, the IPv4 one where it has both.

    None where there is no interface of that name, or it has no address that other hosts reach:
    link-local ones of IPv6 mean something on one host alone.
    """
    import psutil  # type: ignore[import-untyped]  # what trains needs it anyway

    families = socket.AF_INET, socket.AF_INET6
    found = [
        ipaddress.ip_address(entry.address)
        for entry in psutil.net_if_addrs().get(name, ())
        if entry.family in families
    ]
    usable = [one for one in found if one.version == 4 or not one.is_link_local]
    return str(min(usable, key=lambda one: one.version)) if usable else None


def _only_address(addresses: Sequence[str]) -> str:
    """Return the one address by which rank 0 is known; "" where there are more, or names."""
    known = {loopback() if address == "localhost" else address for address in addresses}
    try:
        return str(ipaddress.ip_address(known.pop())) if len(known) == 1 else ""
    except ValueError:
        return ""


def _bound(where: str, port: int, backlog: int) -> socket.socket:
    if where:
        family = socket.AF_INET6 if ":" in where else socket.AF_INET
        try:
            return socket.create_server((where, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # else the ranks reach this host through another
                raise
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise  # else it is compiled in, and switched off
    return socket.create_server(("", port), backlog=backlog)


def _in_words(ports: Sequence[int]) -> str:
    return f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
