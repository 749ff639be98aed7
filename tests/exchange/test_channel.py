"""Messages arrive whole and in order; a peer that is gone or silent is lost, with the cause."""

import contextlib
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from queue import Queue

import pytest

from evenstep._exchange._channel import StarChannel, Wire, text_of
from evenstep._exchange._meeting import Greeting, connect_star
from evenstep._exchange._threads import has_ended, process_name

from .exchanges import FAST, Listener, channel_over, close_all, meet, rendezvous


@pytest.fixture
def pair():
    """Two channels that talk to each other, rank 0 and rank 1, and their listeners."""
    one, other = socket.socketpair()
    channels = channel_over({1: one}, **FAST), channel_over({0: other}, **FAST)
    listeners = Listener(), Listener()
    for channel, listener in zip(channels, listeners, strict=True):
        channel.start(listener)
    yield channels, listeners
    for channel in channels:
        channel.close()


def test_messages_arrive_in_order(pair):
    """Many at once and one larger than a packet, in both directions."""
    (first, second), (at_first, at_second) = pair
    sent = [b"%d" % n + b"x" * (200_000 if n == 3 else 1) for n in range(20)]

    for message in sent:
        first.send_all(message)
        second.send(0, message)

    assert [at_second.messages.get(timeout=5) for _ in sent] == [(0, m) for m in sent]
    assert [at_first.messages.get(timeout=5) for _ in sent] == [(1, m) for m in sent]


def test_a_receiver_that_raises_does_not_end_the_channel(pair, caplog):
    """Its mistake is logged, and the next message arrives."""
    (first, _), (_, at_second) = pair

    first.send_all(b"please raise")
    first.send_all(b"and go on")

    assert at_second.messages.get(timeout=5) == (0, b"please raise")
    assert at_second.messages.get(timeout=5) == (0, b"and go on")
    assert "The exchange failed on a message" in caplog.text


def test_a_log_that_raises_ends_no_exchange(pair):
    """As the handler of a user's that sends records over the network, when that has a break."""
    (first, _), (_, at_second) = pair
    log, failing = logging.getLogger("evenstep"), logging.Handler()
    failing.emit = lambda record: 1 / 0
    log.addHandler(failing)
    first.send(1, b"please raise")
    first.send(1, b"and go on")

    assert at_second.messages.get(timeout=5) == (0, b"please raise")
    assert at_second.messages.get(timeout=5) == (0, b"and go on")
    log.removeHandler(failing)


def test_a_thread_that_fails_is_a_loss_of_all_and_goes_on_ticking(pair, caplog):
    """Both ends hear of it: nobody waits for messages that nobody reads."""
    (first, second), (at_first, at_second) = pair

    def fail(*args):
        raise KeyError("a mistake of ours")

    first._read = fail
    second.send(0, b"to nobody")

    assert at_first.losses.get(timeout=5) == (
        1,
        "the thread that talks to it failed (KeyError('a mistake of ours'))",
    )
    assert at_second.losses.get(timeout=5)[0] == 0
    assert "The exchange between the ranks broke down" in caplog.text
    ticked = threading.Event()
    at_first.tick = ticked.set
    assert ticked.wait(5)


def test_a_closed_connection_is_noticed_at_once(pair):
    """The peer is named, with the reason, and only once."""
    (first, second), (at_first, _) = pair

    second.close()

    peer, problem = at_first.losses.get(timeout=5)
    assert peer == 1
    assert problem.startswith("its connection closed: it ended, was killed or cut off")
    first.send(1, b"to nobody")  # is no error
    assert at_first.losses.empty()


def test_silence_is_noticed_by_the_deadline():
    """An open connection over which nothing comes counts as lost."""
    one, other = socket.socketpair()
    channel, listener = channel_over({7: one}, **FAST), Listener()

    channel.start(listener)
    peer, problem = listener.losses.get(timeout=10)
    channel.close()
    other.close()

    assert peer == 7
    assert problem.startswith("it has been silent for 0.")


def test_a_peer_that_reads_nothing_holds_up_nobody():
    """What its connection does not take is kept, and it is still noticed by the deadline."""
    one, other = socket.socketpair()
    channel, listener = channel_over({7: one}, **FAST), Listener()

    channel.start(listener)
    channel.send(7, b"x" * (8 << 20))
    peer, problem = listener.losses.get(timeout=10)
    channel.close()
    other.close()

    assert peer == 7
    assert problem.startswith("it has been silent for 0.")


def test_what_a_connection_does_not_take_at_once_arrives_whole():
    """In order with what is sent after it, and before the goodbye; no heartbeat is waited for."""
    one, other = socket.socketpair()
    settings = {"heartbeat_s": 600.0, "deadline_s": 6000.0}
    first, second = channel_over({1: one}, **settings), channel_over({0: other}, **settings)
    at_second = Listener()
    first.start(Listener())
    second.start(at_second)
    sent = [b"x" * (4 << 20), b"y" * (4 << 20), b"last"]
    for message in sent:
        first.send(1, message)

    assert [at_second.messages.get(timeout=10)[1] for _ in sent] == sent
    first.send(1, sent[0])
    first.close()
    assert at_second.messages.get(timeout=10)[1] == sent[0]
    second.close()


def test_a_pause_of_this_process_is_no_silence_of_the_others():
    """After having been stopped itself, a process gives the others a new deadline."""
    one, other = socket.socketpair()
    jumped = threading.Event()
    start, now = 100.0, [100.0]

    def clock():
        if jumped.is_set():
            return now[0] + 1000.0
        now[0] += 0.001
        return now[0]

    channel, listener = (
        channel_over({1: one}, heartbeat_s=0.05, deadline_s=500, clock=clock),
        (Listener()),
    )
    channel.start(listener)
    jumped.set()
    channel.call_later(lambda: None, delay_s=0)  # wakes the thread, which finds that 1000 s went by
    done = threading.Event()
    channel.call_later(done.set, delay_s=0)
    assert done.wait(5)
    channel.close()
    other.close()

    assert now[0] > start
    assert list(listener.losses.queue) == []


def test_calls_are_made_in_order_on_the_thread(pair):
    """None is lost: what is still to come when the channel closes is made by the closer."""
    (first, _), _ = pair
    made = Queue()
    for number in range(5):
        first.call_later(
            lambda number=number: made.put((number, threading.current_thread().name)),
            delay_s=0.01,
        )

    calls = [made.get(timeout=5) for _ in range(5)]

    assert calls == [(number, "evenstep-channel") for number in range(5)]

    first.call_later(lambda: made.put("at the close"), delay_s=1000)
    first.close()

    assert made.get(timeout=5) == "at the close"


def test_a_star_connects_everybody_with_rank_zero():
    """The first address that answers is taken, and each rank is known by its number."""
    found = meet(3, addresses=["192.0.2.1.invalid", "127.0.0.1"])

    assert sorted(found[0]) == [1, 2]
    assert list(found[1]) == list(found[2]) == [0]
    for rank in (1, 2):
        found[rank][0].send(text_of(b"rank %d" % rank))
        assert found[0][rank].receive() == [b"rank %d" % rank]
    close_all(found)


def test_an_address_that_nobody_reaches_is_an_error_with_a_remedy():
    """It names what was tried."""
    meeting = {"addresses": ["name.invalid"], "port": 1, "token": "t", "process": None}

    with pytest.raises(ConnectionError, match=r"name\.invalid.*Runtime\(address=...\)"):
        connect_star(1, 2, lambda value: meeting, addresses=[], timeout_s=1)


def test_whoever_answers_nonsense_is_not_rank_zero():
    """Somebody else may listen there."""

    def answer():
        connection, _ = server.accept()
        connection.sendall(bytes(16) + struct.pack("!I", 2) + bytes(32) + b"[]")
        connection.recv(1)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"addresses": ["127.0.0.1"], "port": server.getsockname()[1]}
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionError, match="Rank 1 cannot reach rank 0"):
            connect_star(
                1, 2, lambda value: {**meeting, "token": "t", "process": None}, addresses=[]
            )


def test_ranks_that_never_come_are_named():
    """Rank 0 does not wait for ever."""
    with pytest.raises(ConnectionError, match=r"Ranks 1, 2 did not reach rank 0"):
        connect_star(0, 3, lambda value: value, addresses=["127.0.0.1"], timeout_s=0.2)


def guessed_greeting():
    """The greeting of rank 1, by someone who has guessed the token and the challenge."""
    text = text_of(json.dumps(Greeting(1, None)._asdict()).encode())
    return b"n" * 16 + Wire(b"guessed", is_caller=True).head(text) + text.data


# The third is nested more deeply than Python's parser follows.
GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"n" * 16 + b"\0\0\x0f\xa0" + b"[" * 4032)


@pytest.mark.parametrize("text", [*GARBAGE, guessed_greeting()])
def test_a_stranger_is_turned_away(text):
    """A connection without the token is closed, and the rank behind it still counts as missing."""
    with contextlib.ExitStack() as crowd:

        def share(meeting):
            stranger = crowd.enter_context(socket.create_connection(("127.0.0.1", meeting["port"])))
            stranger.sendall(text)
            return meeting

        with pytest.raises(ConnectionError, match=r"Rank 1 did not reach"):
            connect_star(0, 2, share, addresses=["127.0.0.1"], timeout_s=0.5)


@pytest.mark.parametrize("num_strangers", [4, 200])
def test_strangers_that_drip_hold_up_no_start(num_strangers):
    """They are listened to all at once, and the oldest go where there are too many.

    One after the other they would take five seconds each.
    """
    share = rendezvous(2)
    with contextlib.ExitStack() as crowd:

        def crowded(value):
            meeting = share(value)
            for _ in range(num_strangers if value is None else 0):  # before this rank connects
                address = "127.0.0.1", meeting["port"]
                stranger = crowd.enter_context(socket.create_connection(address))
                stranger.sendall(b"\0")
            return meeting

        stars = meet(share=crowded, timeout_s=9.0)

    assert sorted(stars) == [0, 1]
    assert list(stars[0]) == [1]
    close_all(stars)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_ranks_meet_where_there_is_only_ipv6():
    """By the same socket that hears IPv4."""
    stars = meet(addresses=["::1"])

    assert list(stars[0]) == [1]
    close_all(stars)


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
