"""A connection is made once: where it breaks, the rank behind it is lost, and the cause is said.

Once all ranks have connected, nobody listens: no stranger costs a run anything.
"""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading

import pytest

from evenstep._exchange._channel import StarChannel
from evenstep._exchange._threads import has_ended, process_name
from evenstep._exchange._wire import Wire, text_of

from .channels import FAST, Listener, channel_over, meet

LASTING = {"heartbeat_s": 0.05, "deadline_s": 60.0}
CLOSED = "its connection closed: it ended, was killed or cut off"
REFUSED = (
    "a message over its connection was refused: it is forged, changed, repeated or out of order"
)


@pytest.fixture
def star():
    """Two channels over real connections, their listeners, and what the channels were made of."""
    stars, listeners = meet(), (Listener(), Listener())
    channels = [StarChannel(stars[rank], **LASTING) for rank in (0, 1)]
    for channel, listener in zip(channels, listeners, strict=True):
        channel.start(listener)
    yield channels, listeners, stars
    for channel in reversed(channels):
        channel.close()


@pytest.mark.parametrize("end", [0, 1])
def test_a_connection_that_breaks_names_its_rank_at_once(star, end):
    """On both ends, wherever it breaks, after all that came before; and once."""
    (first, second), (at_first, at_second), stars = star
    for number in range(200):
        first.send(1, b"down %d" % number)
        second.send(0, b"up %d" % number)
    up = [at_first.messages.get(timeout=10) for _ in range(200)]
    down = [at_second.messages.get(timeout=10) for _ in range(200)]
    stars[end][1 - end].connection.shutdown(socket.SHUT_RDWR)

    assert at_first.losses.get(timeout=5) == (1, CLOSED)
    assert at_second.losses.get(timeout=5) == (0, CLOSED)
    first.send(1, b"to nobody")  # is no error
    second.send(0, b"to nobody")
    assert up == [(1, b"up %d" % number) for number in range(200)]
    assert down == [(0, b"down %d" % number) for number in range(200)]
    for listener in (at_first, at_second):
        assert listener.losses.empty()
        assert listener.messages.empty()


def test_the_error_of_a_connection_is_told(star):
    """As where a firewall resets it, or a process is killed with messages that it has not read."""
    _, (at_first, _), stars = star
    connection = stars[1][0].connection
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        connection.close()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    assert at_first.losses.get(timeout=5) == (1, f"{CLOSED} (Connection reset by peer)")


@pytest.mark.parametrize("end", [0, 1])
def test_a_forged_message_names_its_rank_and_is_never_acted_on(star, end):
    """The rank that it came from is lost, with that reason; the other end hears of the close."""
    channels, listeners, stars = star
    forger, victim = channels[end], listeners[1 - end]
    forger.send(1 - end, b"n 0")
    assert victim.messages.get(timeout=5) == (end, b"n 0")
    forged = text_of(b"rank 1 is lost, says a stranger")
    guessed = Wire(b"guessed", is_caller=end == 1).head(forged)
    stars[end][1 - end].connection.sendall(guessed + forged.data)
    forger.send(1 - end, b"n 1")

    assert victim.losses.get(timeout=5) == (end, REFUSED)
    assert listeners[end].losses.get(timeout=5)[0] == 1 - end
    assert victim.messages.empty()


def test_a_loader_worker_that_holds_a_connection_open_hides_no_end(star):
    """A forked process has all files of its rank: the other end has to see the end even so."""
    _, (_, at_second), stars = star
    with stars[0][1].connection.dup():
        stars[1][0].connection.sendall(b"forged" * 100)

        assert at_second.losses.get(timeout=4)[0] == 0


def test_what_is_not_authentic_is_no_sign_of_life():
    """A connection over which bytes come that make no message is silent."""
    one, other = socket.socketpair()
    channel, listener = channel_over({7: one}, **FAST), Listener()
    channel.start(listener)
    stop = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            other.sendall(struct.pack("!I", 1 << 20))  # one that never comes to its end
            while not stop.wait(0.02):
                other.send(b"\0")

    thread = threading.Thread(target=drip)
    thread.start()
    peer, problem = listener.losses.get(timeout=10)
    stop.set()
    thread.join()
    channel.close()
    other.close()

    assert peer == 7
    assert problem.startswith("it has been silent for 0.")


def test_a_flood_of_connections_disturbs_no_run(star):
    """Each is refused by the system, as nobody listens; no rank hears of it, or is lost."""
    (first, second), listeners, stars = star
    address = stars[1][0].connection.getpeername()
    stop, refused, taken = threading.Event(), [], []

    def flood():
        while not stop.is_set():
            try:
                taken.append(socket.create_connection(address))
            except ConnectionRefusedError:
                refused.append(1)

    strangers = [threading.Thread(target=flood) for _ in range(4)]
    for stranger in strangers:
        stranger.start()
    for number in range(500):
        first.send(1, b"down %d" % number)
        assert listeners[1].messages.get(timeout=10) == (0, b"down %d" % number)
        second.send(0, b"up %d" % number)
        assert listeners[0].messages.get(timeout=10) == (1, b"up %d" % number)
    stop.set()
    for stranger in strangers:
        stranger.join()

    assert len(refused) > 4
    assert not taken
    assert all(listener.losses.empty() for listener in listeners)


STUCK = """
import sys, threading
from evenstep._exchange._threads import end_process

class Both:
    def write(self, text):
        sys.__stderr__.write(text)

    def flush(self):
        sys.__stderr__.flush()

sys.stderr = Both()
side = threading.Thread(target=end_process, args=("rank 1 is gone",))
side.start()
side.join()
"""


def test_a_stuck_process_is_ended_whatever_standard_error_is():
    """Scripts put an object there that is no file, as one that writes to a log as well."""
    ended = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1
    assert "rank 1 is gone" in ended.stderr
    assert "in end_process" in ended.stderr


def test_a_process_that_ended_is_known_to_have():
    """By its name on this machine, as a zombie too; one elsewhere cannot be told."""
    here = process_name()
    machine = here.rpartition("/")[0]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = f"{machine}/{child.pid}"
    alive = has_ended(name, here)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie until somebody waits for it
    zombie = has_ended(name, here)
    child.wait()

    assert (alive, zombie, has_ended(name, here)) == (False, True, True)
    assert not has_ended(f"another/{child.pid}", here)
    assert not has_ended(None, here)
