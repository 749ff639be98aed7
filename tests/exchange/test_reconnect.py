"""A connection that breaks between two living ranks costs nothing but a warning."""

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading

import pytest

from evenstep._exchange._channel import StarChannel
from evenstep._exchange._process import has_ended, process_name
from evenstep._exchange._wire import VERSION, Wire, encode

from .channels import FAST, Listener, meet

DEEP = b"n" * 16 + struct.pack("!IQ", 4000, 0) + b"[" * 4032  # more than Python's parser follows
LASTING = {"heartbeat_s": 0.05, "deadline_s": 10.0, "reconnect_s": 5.0}


@pytest.fixture
def star():
    """Two channels over real connections that can be made again: rank 0's, rank 1's, listeners."""
    opened = []

    def make(**settings):
        stars, watch = meet(), LASTING | settings
        channels = [StarChannel(stars[r].connections, star=stars[r], **watch) for r in (0, 1)]
        opened.extend(channels)
        listeners = Listener(), Listener()
        for channel, listener in zip(channels, listeners, strict=True):
            channel.start(listener)
        return channels, listeners, stars

    yield make
    for channel in reversed(opened):
        channel.close()


def cut(channel, peer):
    """Break a connection, if it is not broken already."""
    with contextlib.suppress(OSError):
        channel._peers[peer].connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("end", [0, 1])
def test_a_connection_that_breaks_is_made_again(star, caplog, end):
    """Whichever end it breaks at, every message arrives once and in order, and a person is told."""
    (first, second), (at_first, at_second), _ = star()
    broken = (first, second)[end]
    for number in range(200):
        first.send(1, {"down": number})
        second.send(0, {"up": number})
        if number in (50, 51, 120):
            cut(broken, 1 - end)

    up = [at_first.messages.get(timeout=10) for _ in range(200)]
    down = [at_second.messages.get(timeout=10) for _ in range(200)]

    assert up == [(1, {"up": number}) for number in range(200)]
    assert down == [(0, {"down": number}) for number in range(200)]
    assert at_first.losses.empty()
    assert at_second.losses.empty()
    assert "was restored" in caplog.text


def test_a_log_that_raises_ends_no_exchange(star):
    """As the handler of a user's that sends records over the network, when that has a break."""
    (first, _), (_, at_second), _ = star()
    log, failing = logging.getLogger("evenstep"), logging.Handler()
    failing.emit = lambda record: 1 / 0
    log.addHandler(failing)
    cut(first, 1)
    first.send(1, {"still": "here"})

    assert at_second.messages.get(timeout=5) == (0, {"still": "here"})
    first.send(1, {"and": "later"})
    assert at_second.messages.get(timeout=5) == (0, {"and": "later"})
    log.removeHandler(failing)


def test_a_message_cut_in_the_middle_arrives_whole(star):
    """The half that came over the broken connection is forgotten."""
    (first, _), (at_first, at_second), _ = star()
    first.send(1, {"n": 0})
    assert at_second.messages.get(timeout=5) == (0, {"n": 0})
    half = first._peers[1]
    text = encode({"n": 1})
    with half._lock:
        half._unsure.append(text)
        half.connection.sendall(half._wire.head(text, 0) + text.data[:3])
    cut(first, 1)
    first.send(1, {"n": 2})

    assert at_second.messages.get(timeout=5) == (0, {"n": 1})
    assert at_second.messages.get(timeout=5) == (0, {"n": 2})
    assert at_first.losses.empty()


@pytest.mark.parametrize("end", [0, 1])
def test_a_forged_message_ends_its_connection_alone(star, caplog, end):
    """It is refused with a reason, and never acted on; the connection is made again."""
    channels, listeners, _ = star()
    forger, victim = channels[end], listeners[1 - end]
    forger.send(1 - end, {"n": 0})
    assert victim.messages.get(timeout=5) == (end, {"n": 0})
    forged = encode({"lost": 1, "problem": "says a stranger"})
    guessed = Wire(b"guessed", is_caller=end == 1).head(forged, 0)
    forger._peers[1 - end].connection.sendall(guessed + forged.data)
    forger.send(1 - end, {"n": 1})

    assert victim.messages.get(timeout=5) == (end, {"n": 1})
    assert all(listener.losses.empty() for listener in listeners)
    assert "a message was refused: it is forged, changed, repeated or out of order" in caplog.text


def test_what_a_loader_worker_holds_open_is_made_again_too(star):
    """A forked process has all files of its rank: the other end has to see the end even so."""
    (first, second), (at_first, _), _ = star()
    second.send(0, {"n": 0})
    assert at_first.messages.get(timeout=5) == (1, {"n": 0})
    with first._peers[1].connection.dup():
        second._peers[0].connection.sendall(b"forged" * 100)
        second.send(0, {"n": 1})

        assert at_first.messages.get(timeout=4) == (1, {"n": 1})
    assert at_first.losses.empty()


def test_what_is_not_authentic_is_no_sign_of_life():
    """A connection over which bytes come that make no message is silent."""
    one, other = socket.socketpair()
    channel, listener = StarChannel({7: one}, **FAST), Listener()
    channel.start(listener)
    stop = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            other.sendall(struct.pack("!IQ", 1 << 20, 0))  # one that never comes to its end
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


def test_one_that_cannot_be_made_again_is_a_loss_in_time(star):
    """If the way to rank 0 is closed for good, both say so by the limit."""
    (first, _), (at_first, at_second), stars = star(reconnect_s=0.3)
    stars[0].server.shutdown(socket.SHUT_RDWR)
    cut(first, 1)

    assert at_first.losses.get(timeout=5)[0] == 1
    peer, problem = at_second.losses.get(timeout=5)
    assert peer == 0
    assert "it made no new one within 0." in problem


def test_tries_that_last_longer_than_heartbeats_come_to_an_end(star):
    """As where the host of rank 0 is gone: it answers nothing, and each try takes a second."""
    (first, _), (_, at_second), stars = star(reconnect_s=0.3)
    stars[0].server.shutdown(socket.SHUT_RDWR)
    with socket.create_server(
        ("127.0.0.1", stars[0].meeting.port)
    ):  # takes calls, and says nothing
        cut(first, 1)

        peer, problem = at_second.losses.get(timeout=8)
    assert peer == 0
    assert "it made no new one within" in problem


def test_a_channel_closed_on_purpose_is_no_break(star):
    """Its peer knows at once, and does not try to reach it."""
    (_, second), (at_first, _), _ = star(reconnect_s=1000)

    second.close()

    assert at_first.losses.get(timeout=5) == (
        1,
        "its connection closed: it ended, was killed or cut off",
    )


def test_what_arrived_is_not_kept(star):
    """Whatever comes back says how much that is."""
    (first, second), (at_first, at_second), _ = star()
    for number in range(100):
        first.send(1, {"n": number})
    for _ in range(100):
        at_second.messages.get(timeout=5)
    second.send(0, {"counted": "with everything that is sent"})
    at_first.messages.get(timeout=5)

    assert len(first._peers[1]._unsure) == 0


def test_strangers_at_the_door_disturb_nobody(star, monkeypatch):
    """Silent ones, loud ones, and one who knows a rank but not the token."""
    monkeypatch.setattr("evenstep._exchange._door._GREETING_S", 0.5)
    (first, _), (at_first, at_second), stars = star()
    port = stars[0].meeting.port
    silent = socket.create_connection(("127.0.0.1", port))
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, DEEP, guessed_greeting()):
        with socket.create_connection(("127.0.0.1", port)) as loud:
            loud.sendall(text)
            loud.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while loud.recv(16):  # the challenge, and then it is turned away
                    pass
    first.send(1, {"still": "here"})

    assert at_second.messages.get(timeout=5) == (0, {"still": "here"})
    assert at_first.losses.empty()
    silent.close()


def test_idle_strangers_stay_few_and_keep_nobody_out(star):
    """A flood of connections that say nothing: the oldest go, a rank comes back."""
    (first, second), (_, at_second), stars = star()
    port = stars[0].meeting.port
    with contextlib.ExitStack() as flood:
        strangers = [
            flood.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(200)
        ]
        for stranger in strangers[: 200 - 65]:
            stranger.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(16):  # turned away
                    pass
        cut(second, 0)
        first.send(1, {"still": "here"})

        assert at_second.messages.get(timeout=5) == (0, {"still": "here"})


def test_a_connection_that_is_listened_to_no_more_can_be_forgotten(star):
    """Unknown, or closed already."""
    (first, _), (_, at_second), _ = star()
    one, other = socket.socketpair()
    other.close()
    for connection in (one, other):
        first._forget(connection)
    one.close()
    first.send(1, {"still": "here"})

    assert at_second.messages.get(timeout=5) == (0, {"still": "here"})


def guessed_greeting():
    """The greeting of rank 1, by someone who has guessed the token and the challenge."""
    text = encode({"version": VERSION, "rank": 1, "process": None})
    return b"n" * 16 + Wire(b"guessed", is_caller=True).head(text, 0) + text.data


STUCK = """
import sys, threading
from evenstep._exchange._process import end_process

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
