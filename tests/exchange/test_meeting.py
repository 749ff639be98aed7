"""Ranks meet: rank 0 listens where it was told to, and all are compared in what they state."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from functools import partial
from types import ModuleType

import psutil
import pytest

from evenstep import torch as ours
from evenstep._exchange._meeting import Meeting, connect_star, dial, interface_address, listen
from evenstep._exchange._threads import line_of_user, network_name, process_name
from evenstep._exchange._world_check import (
    code_of,
    described,
    difference,
    differing,
    first_different,
    refusal,
)
from evenstep._planner import Bounds
from evenstep.policies import Auto

from .exchanges import close_all, meet, rendezvous


def listening(addresses, ports=(0,)):
    """Return address and port that a socket listens at."""
    with listen(addresses, ports, backlog=1, timeout_s=0.3) as server:
        return server.getsockname()[:2]


def free_ports():
    """Return two ports in a row; the first is held by a socket, which is returned too."""
    while True:
        holder = socket.create_server(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        try:
            socket.create_server(("127.0.0.1", port + 1)).close()
        except (OSError, OverflowError):
            holder.close()
        else:
            return holder, port


def test_a_range_gives_its_first_free_port():
    """As several runs on one host need it."""
    holder, port = free_ports()

    with holder:
        assert listening(["127.0.0.1"], range(port, port + 2)) == ("127.0.0.1", port + 1)


def test_a_port_in_use_is_an_error_on_all_ranks():
    """It names the ports, and how to give others; the others do not wait for rank 0."""
    holder, port = free_ports()
    share, errors = rendezvous(2), []

    def join(rank):
        try:
            connect_star(
                rank, 2, share, addresses=["127.0.0.1"], ports=range(port, port + 1), timeout_s=0.3
            )
        except ConnectionError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    with holder:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

    assert errors[0] == errors[1]
    assert errors[0].startswith("`Runtime(ports=...)` must have a port that rank 0 can listen at")
    assert f"got {port}: " in errors[0]
    assert "Address already in use" in errors[0]
    assert "range(29600, 29700)" in errors[0]


def test_a_port_that_is_released_in_time_is_taken():
    """A run that has just ended may leave loader workers behind, which hold it for a moment."""
    holder, port = free_ports()
    timer = threading.Timer(0.3, holder.close)
    timer.start()

    with listen(["127.0.0.1"], [port], backlog=1, timeout_s=20) as server:
        assert server.getsockname()[1] == port
    timer.join()


def test_a_port_is_free_once_all_ranks_have_connected():
    """For the next run, while this one lasts, and though a forked process holds the socket."""
    share, held = rendezvous(2), []

    def forking(value):
        if value is not None:
            (server,) = (one for one in psutil.Process().net_connections() if is_at(one, value))
            held.append(socket.socket(fileno=os.dup(server.fd)))
        return share(value)

    stars = meet(share=forking)
    port = held[0].getsockname()[1]

    with held[0]:
        assert listening(["127.0.0.1"], [port]) == ("127.0.0.1", port)
    close_all(stars)


def is_at(connection, meeting):
    """Tell whether a socket listens at the port of a meeting."""
    return (connection.status, connection.laddr.port) == (psutil.CONN_LISTEN, meeting["port"])


@pytest.mark.parametrize(
    ("addresses", "where"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["localhost"], "127.0.0.1"),
        (["127.0.0.2"], "127.0.0.2"),
        (["192.0.2.1"], "everywhere"),  # reached through another one, which forwards
        (["node7"], "everywhere"),
        (["127.0.0.1", "node7"], "everywhere"),
    ],
)
def test_it_listens_where_the_ranks_know_it(addresses, where):
    """At its one address; at all where that is not known."""
    assert listening(addresses)[0] in (("::", "0.0.0.0") if where == "everywhere" else (where,))


MEETING = """
import sys, threading
from queue import Queue
import psutil
from evenstep._exchange._meeting import connect_star, loopback
told = Queue()
def share(value):
    if value is None:
        return told.get(timeout=20)
    print(*[one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"])
    told.put(value)
    return value
address = loopback() if sys.argv[1] == "loopback" else sys.argv[1]
threading.Thread(target=connect_star, args=(1, 2, share), kwargs={"addresses": []}).start()
connect_star(0, 2, share, addresses=[address])
"""


@pytest.mark.parametrize("address", ["loopback", "::1"])
def test_a_host_with_the_ipv6_loopback_alone_starts_and_listens_there(address):
    """At all of its addresses, others would reach a port that is none of their business."""
    inside = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
    command = ["unshare", "-rn", "sh", "-c", inside, "sh"]
    try:
        subprocess.run([*command, "grep", "-q", " lo$", "/proc/net/if_inet6"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network of its own can be made here")
    done = subprocess.run(
        [*command, sys.executable, "-c", MEETING, address], capture_output=True, text=True
    )

    assert done.stdout == "::1\n", done.stderr


def test_an_interface_stands_for_its_address():
    """By its name, as gloo has it; other words are none."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))

    assert interface_address(loopback) == "127.0.0.1"
    assert interface_address("node7") is None


def test_a_copy_of_a_machine_under_another_name_is_another_machine():
    """Copies of one that was suspended share the name of its boot, and numbers of namespaces."""
    host = socket.gethostname()

    assert f"/{host}/" in network_name()
    assert f"/{host}/" in process_name()


@pytest.mark.parametrize(
    "ports", [0, 65536, True, "29600", (29600, 29700), range(0), range(65000, 66000)]
)
def test_what_is_no_port_is_refused(ports):
    """With the value, and what to give."""
    with pytest.raises(ValueError, match=r"`Runtime\(ports=...\)` must be a port") as caught:
        ours.Runtime(ports=ports)

    assert repr(ports) in str(caught.value)
    assert "range(29600, 29700)" in str(caught.value)


SHORT_OF_FILES = """
import resource
from evenstep._exchange._meeting import Meeting, connect_star, dial

resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
share = lambda meeting: print(meeting["port"], meeting["token"], flush=True)
connect_star(0, 41, share, addresses=["127.0.0.1"])
"""


def test_more_ranks_than_open_files_are_an_error_with_a_remedy():
    """At once, and not as ranks that never came."""
    command = [sys.executable, "-c", SHORT_OF_FILES]
    rank_0 = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    port, token = rank_0.stdout.readline().split()
    meeting = Meeting(("127.0.0.1",), int(port), token, None)
    with contextlib.ExitStack() as calls, contextlib.suppress(ConnectionError):
        for rank in range(1, 41):
            calls.enter_context(dial(meeting, rank, timeout_s=20).connection)
    _, text = rank_0.communicate(timeout=50)

    assert "Rank 0 needs 40 connections and cannot open that many" in text
    assert "Raise `ulimit -n`" in text


def test_what_is_the_same_on_all_ranks_is_no_difference():
    """Nor is what one rank does not state."""
    assert difference([{"": {"a": "1"}}] * 3, {}) is None
    assert difference([{"": {"a": "1"}}, {"": {}}, {}], {}) is None


def test_each_difference_is_named_with_its_values_its_ranks_and_its_remedy():
    """In one text; of several loaders, which one."""
    stated = [{"": {"`A(b=...)`": "1"}, "loader 2": {"c": str(rank % 2)}} for rank in range(3)]
    stated[2][""]["`A(b=...)`"] = "2"

    assert differing(stated) == [("", "`A(b=...)`"), ("loader 2", "c")]
    assert difference(stated, {"c": "Mend it."}) == (
        "`A(b=...)` must be the same on all ranks, got 1 on ranks 0, 1 and 2 on rank 2. Set it "
        "alike.\n"
        "c (loader 2) must be the same on all ranks, got 0 on ranks 0, 2 and 1 on rank 1. Mend it."
    )


def test_many_ranks_and_many_values_stay_one_sentence():
    """Runs of ranks are drawn together, and long values and long lists cut."""
    text = refusal("x", ["a", *"bbbb", "a", "a", "a", "b", None], "Do.")
    assert (
        text == "x must be the same on all ranks, got a on ranks 0, 5 to 7 and b on ranks 1 to "
        "4, 8. Do."
    )
    text = refusal("x", [str(rank) * 1000 for rank in range(9)], "Do.")
    assert "and 6 other values on the other ranks" in text
    assert len(text) < 700


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "1", "b": "2"}, {"a": "1", "b": "3"}),
        ({"a": "1", "b": "2"}, {"a": "1"}),
        ({"a": "1"}, {"a": "1", "b": "2"}),
    ],
)
def test_the_first_entry_that_differs_is_found(one, other):
    """Also where a rank lacks it."""
    name, values = first_different([one, other])

    assert name == "b"
    assert values == [one.get("b", "none"), other.get("b", "none")]


def test_entries_in_another_order_are_told():
    """The entries themselves are all alike then."""
    name, values = first_different([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}])

    assert (name, values) == ("the order", ["a, b", "b, a"])


class Nameless:
    """An object whose text has its address in it."""


class Broken:
    """An object that has no text."""

    def __repr__(self):
        raise RuntimeError("no")


def test_a_text_of_a_setting_is_the_same_in_every_process():
    """No address, no order of a set; settings of frozen values are told."""
    assert described(Bounds(max=(5, 6))).startswith("Bounds(min='auto', max=(5, 6), ")
    assert described(Auto()) == described(Auto())
    assert described({"b", "a"}) == "{'a', 'b'}"
    assert " at 0x" not in described([Nameless(), len, lambda: 0, partial(len), object])
    assert described(Nameless()).endswith("test_meeting.Nameless")
    assert described(Broken()).endswith("test_meeting.Broken")
    assert described(partial(described)).startswith("partial(")


def test_functions_are_told_apart_by_their_code_in_one_version_of_python():
    """Also by that of functions inside of them; what has no code tells nothing."""
    assert code_of(lambda x: x + 1) == code_of(lambda x: x + 1)
    assert code_of(lambda x: x + 1) != code_of(lambda x: x + 2)
    assert code_of(lambda x: x.a) != code_of(lambda x: x.b)
    assert code_of(lambda x: [y + 1 for y in x]) != code_of(lambda x: [y + 2 for y in x])
    assert code_of("tokens") == code_of(len) == {}


def test_a_framework_that_lies_among_users_files_is_no_script_of_theirs(monkeypatch):
    """As after a build in place: a rank that waits in it is seen to wait, at the user's line."""
    module = ModuleType("tensorflow")
    module.__file__ = "/home/me/builds/tensorflow/__init__.py"
    code = compile("wait = lambda look: look()", "/home/me/builds/tensorflow/wait.py", "exec")
    exec(code, module.__dict__)

    assert "in <lambda>" in module.wait(lambda: line_of_user(sys._getframe().f_back))
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    found = module.wait(lambda: line_of_user(sys._getframe().f_back))

    assert "test_meeting.py" in found
    assert "in test_a_framework_that_lies_among" in found
