"""Messages: greeted, numbered, tagged, and as they were sent; or an error says why not."""

import contextlib
import errno
import json
import math
import selectors
import socket
import threading
import zlib

import msgspec
import numpy as np
import pytest

from evenstep._diagnosis import HostClues, LinkClues, StepClues
from evenstep._exchange import _message_kinds as m
from evenstep._exchange._channel import (
    HEARTBEAT,
    PROTOCOL,
    VERSION,
    ProtocolError,
    Wire,
    check_versions,
    text_of,
)
from evenstep._exchange._meeting import (
    Acceptor,
    Greeting,
    Meeting,
    PendingPeer,
    connect_star,
    dial,
    greet,
)
from evenstep._planner import Plan, PlanCosts, Report, Work
from evenstep.claims._step_claims import Claim

from .exchanges import close_all, rendezvous


def ends(key=b"key"):
    """Return both ends of a connection: the caller's, and rank 0's."""
    return Wire(key, is_caller=True), Wire(key, is_caller=False)


def sent(wire, *messages):
    """Return each of some messages as bytes."""
    return [wire.head(text) + text.data for text in map(text_of, messages)]


@pytest.mark.parametrize("is_up", [True, False])
def test_messages_come_through_in_both_directions(is_up):
    """Whole, with heartbeats among them."""
    caller, rank_0 = ends()
    one, other = (caller, rank_0) if is_up else (rank_0, caller)
    (first,) = sent(one, b"n 1")
    beat = one.head(HEARTBEAT)
    (second,) = sent(one, b"n 2")
    data, taken, at = first + beat + second, [], 0
    for _ in range(3):
        assert other.take(data[: at + 35], at) is None  # not complete
        said, at = other.take(data, at)
        taken.append(said)

    assert taken == [b"n 1", b"", b"n 2"]
    assert at == len(data)


def test_every_changed_byte_is_noticed():
    """Be it of the length, the tag or the text."""
    (message,) = sent(ends()[0], b"step 3")
    for position in range(2, len(message)):  # with the first two, it would be a longer message
        changed = bytearray(message)
        changed[position] ^= 1
        _, rank_0 = ends()
        with pytest.raises(ValueError, match="forged, changed"):
            rank_0.take(changed + bytes(300))


def forgeries():
    """Yield what is authentic, and what an attacker could put behind that."""
    caller, rank_0 = ends()
    first, second, third = sent(caller, b"n 1", b"n 2", b"n 3")
    (down,) = sent(rank_0, b"n 1")
    (foreign,) = sent(ends(b"another connection's")[0], b"n 1")
    yield pytest.param(first, first, id="repeated")
    yield pytest.param(b"", second, id="reordered")
    yield pytest.param(first, third, id="left out")
    yield pytest.param(b"", down, id="sent back")
    yield pytest.param(b"", foreign, id="another connection's")
    yield pytest.param(first, second[:4] + bytes(32) + second[36:], id="without a tag")


@pytest.mark.parametrize(("authentic", "forged"), [*forgeries()])
def test_what_is_not_the_next_message_is_refused(authentic, forged):
    """What came before it is taken."""
    _, rank_0 = ends()
    data = authentic + forged
    if authentic:
        assert rank_0.take(data)[0] == b"n 1"

    with pytest.raises(ValueError, match="forged, changed, repeated or out of order"):
        rank_0.take(data, len(authentic))


def test_a_message_that_claims_to_be_huge_is_refused_at_once():
    """Its text is not waited for, nor room made for it."""
    _, rank_0 = ends()

    with pytest.raises(ValueError, match="claims to have 4294967280 bytes"):
        rank_0.take(b"\xff\xff\xff\xf0" + bytes(40))


def test_unlike_versions_are_named_with_their_ranks():
    """And equal ones are no error."""
    check_versions({0: "1.0", 1: "1.0"})

    with pytest.raises(ProtocolError, match=r"got 1\.0 on ranks 0, 2 and 1\.1 on rank 1"):
        check_versions({0: "1.0", 1: "1.1", 2: "1.0"})


class Tap:
    """Stands between a rank and rank 0, and keeps what the rank sends."""

    def __init__(self, port):
        self._server = socket.create_server(("127.0.0.1", 0))
        self._ends = []
        self.port, self.heard = self._server.getsockname()[1], b""
        self._threads = [threading.Thread(target=self._relay, args=(port,))]
        self._threads[0].start()

    def _relay(self, port):
        connection, _ = self._server.accept()
        onward = socket.create_connection(("127.0.0.1", port))
        self._ends += connection, onward
        back = threading.Thread(target=self._copy, args=(onward, connection))
        self._threads.append(back)
        back.start()
        self._copy(connection, onward, keep=True)

    def _copy(self, source, target, *, keep=False):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if keep:
                    self.heard += data
                target.sendall(data)

    def close(self):
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in (*self._ends, self._server):
            end.close()


def test_a_replayed_greeting_is_refused():
    """All that rank 1 has sent, sent again by a stranger while rank 0 waits for rank 2."""
    share, stars, taps = rendezvous(3), {}, []

    def through_a_tap(value):
        meeting = share(value)
        taps.append(Tap(meeting["port"]))
        return {**meeting, "port": taps[0].port}

    def join(rank, share):
        stars[rank] = connect_star(rank, 3, share, addresses=["127.0.0.1"])

    threads = [threading.Thread(target=join, args=(0, share))]
    threads[0].start()
    join(1, through_a_tap)
    with socket.create_connection(("127.0.0.1", share(None)["port"])) as stranger:
        stranger.sendall(taps[0].heard)
        stranger.settimeout(10)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := stranger.recv(4096):
                answer += data
    join(2, share)
    threads[0].join(20)
    stars[1][0].send(text_of(b"n 1"))

    assert len(answer) <= 16, "the challenge, and no welcome"
    assert stars[0][1].receive() == [b"n 1"]
    close_all(stars)
    taps[0].close()


PACKAGE, OWN = VERSION.split(" ", 1)
UNLIKE = pytest.mark.parametrize("other", [f"99.0 {OWN}", f"{PACKAGE} (protocol 99)"])


@UNLIKE
def test_a_rank_of_another_version_ends_the_start_on_both(other):
    """With both versions, of the package and of the protocol, and not as one that never came."""
    share, errors = rendezvous(2), []

    def join():
        meeting = share(None)
        with socket.create_connection(("127.0.0.1", meeting["port"])) as connection:
            _, version = greet(connection, meeting["token"], Greeting(1, None, version=other))
            errors.append(version)

    thread = threading.Thread(target=join)
    thread.start()
    with pytest.raises(ProtocolError) as caught:
        connect_star(0, 2, share, addresses=["127.0.0.1"])
    thread.join(10)

    assert f"got {VERSION} on rank 0 and {other} on rank 1. Install" in str(caught.value)
    assert errors == [VERSION]


@UNLIKE
def test_rank_zero_of_another_version_is_named(other):
    """At once, by the rank that reaches it."""

    def answer():
        connection, _ = server.accept()
        newcomer = PendingPeer(connection, "t")
        while newcomer.read() is None:
            pass
        text = text_of(json.dumps({"version": other}).encode())
        connection.sendall(newcomer._wire.head(text) + text.data)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        meeting = Meeting(("127.0.0.1",), server.getsockname()[1], "t", None)
        with pytest.raises(ProtocolError) as caught:
            dial(meeting, 1, timeout_s=10)
        thread.join(10)

    assert f"got {other} on rank 0 and {VERSION} on rank 1. Install" in str(caught.value)


def test_a_rank_that_is_turned_away_comes_again():
    """A crowd of strangers may have pushed it out of the door."""
    num_calls = []

    def answer():
        for turn_away in (True, True, False):
            connection, _ = server.accept()
            num_calls.append(1)
            newcomer = PendingPeer(connection, "t")
            while not turn_away and newcomer.read() is None:
                pass
            if not turn_away:
                newcomer.welcome()
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        meeting = Meeting(("127.0.0.1",), server.getsockname()[1], "t", None)
        dial(meeting, 1, timeout_s=20).close()
        thread.join(10)

    assert len(num_calls) == 3


class Full:
    """A server with too many files open to accept anybody."""

    def accept(self):
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def flooded():
    """An acceptor, its server, a rank that has answered there, and strangers who wait behind it."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
        server.setblocking(False)
        selector = opened.enter_context(selectors.DefaultSelector())
        acceptor = Acceptor("t", selector, num_ranks=2)
        opened.callback(acceptor.close)

        def call():
            return opened.enter_context(socket.create_connection(server.getsockname()))

        rank, welcomes = call(), []
        thread = threading.Thread(
            target=lambda: welcomes.append(greet(rank, "t", Greeting(1, None))[1])
        )
        acceptor.accept(server, 0.0)
        thread.start()
        ((key, _),) = selector.select(timeout=20)  # its answer is there, and is not read yet
        for _ in range(200):
            call()
        yield acceptor, server, key.data
        thread.join(20)
        assert welcomes == [VERSION]


def test_a_rank_that_has_answered_is_not_turned_away_for_strangers(flooded):
    """Three times as many strangers as there are places come before its answer is read."""
    acceptor, server, rank = flooded
    for _ in range(4):
        acceptor.accept(server, 0.0)

    said, peer = acceptor.let_in(rank)
    peer.close()
    assert said == Greeting(1, None)


def test_nor_where_too_many_files_are_open(flooded):
    """A stranger goes, to make room for others."""
    acceptor, server, rank = flooded
    acceptor.accept(server, 0.0)
    acceptor.accept(Full(), 0.0)

    said, peer = acceptor.let_in(rank)
    peer.close()
    assert said == Greeting(1, None)


PLAN = {"epoch": 1, "first_step": 2, "batch_size": [3, 4]}
KINDS = m.Message.__subclasses__()
REPORT = Report(3, 8, 16, 0.1, 0.0, wall_s=math.inf, holds=True, limit=None, free_cpu=0.5)
EXAMPLES = [
    m.StepReports(3, (REPORT, REPORT._replace(wall_s=None, fault="no clock"))),
    m.StepReports(4, ()),
    m.PlanRequest(3),
    m.PlanReply(Plan(1, 2, (3, 4), tail=(0, 1), reason="why")),
    m.Answer(3, 5),
    m.Answer(3, 5, 3, stops=True),
    m.HoldNothing(),
    m.StopRequest(),
    m.DoneRequest(3),
    m.DoneReply(3),
    m.Units(3, 2.5),
    m.TimesReport(3, tuple(range(11))),
    m.TimesReport(
        3,
        tuple(range(11)),
        StepClues(gc_us=4000, size=-7),
        HostClues(4, 1.0, 0.9, 0.25, links=(LinkClues("10.0.0.1:1", "10.0.0.2:2", 9, 8, 7, 6, 5),)),
    ),
    m.ClaimRequest(1, 3, None, own=True),
    m.ClaimReply(1, (Claim(0, 2, 4), Claim(1, 0, 1))),
    m.NumbersReport((0, 1, 2), (3, 4)),
    m.NumbersReply((0, 1, 2), "<u1", b"\x07"),
    m.Reduced(0, 1, {3: 1.0, 4: None}, maybe=(5, 6)),
    m.StepsRequest((0, 1)),
    m.StepsReply((0, 1), (3,)),
    m.NotFiniteReport(3, is_half=True),
    m.ScalesReport(3, ((0, 1, 0.5, 20.0, 0.01),)),
    m.GradientsWrong("a sum"),
    m.ProgressReport({"steps": 3, "gloo group 0": 7}, is_paused=True, awaited={"loader 0": 2}),
    m.LocationRequest(),
    m.ThreadLocation("at train.py:3", in_collective=True, compiling=False),
    m.SharesReport(3, 1, math.inf, ((0, 1, 1e6, 0.5),), 0.1),
    m.SharesReport(3, 1, 0.5, None),
    m.SharesReply((1, 2, (1, 3), None, "why", None)),
    m.CollectiveBroke(),
    m.RankLost(1, "it is gone"),
    m.RankLost(1, "it is gone", 136),
    m.GradientsWrong("it did other batches", 1),
    m.Goodbye(3, 2, 1),
    m.Goodbye(3, 2, 1, (2, "it raised")),
]


def test_all_messages_arrive_as_they_were_sent():
    """In one piece and in order; there is an example of every kind here."""
    assert m.read(m.written(EXAMPLES)) == EXAMPLES
    assert {type(example) for example in EXAMPLES} == set(KINDS)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["LaterKind", 3]], "Invalid value 'LaterKind'"),
        ([["DoneReply"]], "DoneReply"),
        ([["DoneReply", 3, 4]], "at most length 1, got 2"),
        ([["HoldNothing", 1]], "at most length 0, got 1"),
        ([["DoneReply", 3.0]], "Expected `int`, got `float` - at `$[0][1]` in b'"),
        ([["DoneReply", True]], "Expected `int`, got `bool`"),
        ([["Units", 3, None]], "Expected `float`, got `None`"),
        ([["Answer", 1, 2, 1, "1"]], "Expected `bool`, got `str` - at `$[0][4]`"),
        ([["StepReports", 3, [[3, 8]]]], "Expected `array` of length 5 to"),
        ([["StepReports", 3, [3]]], "Expected `array`, got `int` - at `$[0][2][0]`"),
        ([["PlanReply", [1, 2, [3, 4]]]], "Expected `object`, got `array` - at `$[0][1]`"),
        ([["PlanReply", PLAN | {"batch_size": "34"}]], "at `$[0][1].batch_size`"),
        ([["PlanReply", PLAN | {"batch_size": [3, "4"]}]], "at `$[0][1].batch_size[1]`"),
        ([["TimesReport", 3, [1.5] * 11]], "Expected `int`, got `float` - at `$[0][2][0]`"),
        ([["StepsRequest", [0]]], "Expected `array` of length 2, got 1"),
        ([["ProgressReport", [], False, {}, {}]], "Expected `object`, got `array`"),
        ([["Reduced", 0, 1, {"x": 1.0}, [], 0]], "Expected `int`, got `str` - at `key`"),
        ({"step": 3}, "Expected `array`, got `object`"),
        ([3], "Expected `array`, got `int`"),
        (None, "Expected `array`, got `None`"),
    ],
)
def test_what_is_not_known_is_named(rows, words):
    """Its type and what came, where that stands, and the first bytes: the kind is among them."""
    with pytest.raises(m.MessageError) as caught:
        m.read(msgspec.msgpack.encode(rows))

    assert words in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data + data, lambda _: b""]
)
def test_what_is_not_one_value_is_refused(damage):
    """Cut off, or with more after it."""
    with pytest.raises(m.MessageError):
        m.read(damage(m.written([m.DoneReply(3)])))


def test_a_long_message_that_is_not_known_is_shown_in_part():
    """An error is read by people."""
    with pytest.raises(m.MessageError) as caught:
        m.read(msgspec.msgpack.encode([["LaterKind", "x" * 10_000]]))

    assert len(str(caught.value)) < 200


def test_floats_of_numpy_arrive_as_such():
    """What is measured often is one; any other object is a mistake of ours."""
    data = m.written([m.Units(3, np.float64(2.5)), m.Units(4, np.float32(0.5))])
    assert m.read(data) == [m.Units(3, 2.5), m.Units(4, 0.5)]

    with pytest.raises(TypeError):
        m.written([m.Units(3, object())])


def test_the_version_stands_for_what_travels():
    """Where this fails, what ranks send has changed: count `PROTOCOL` up, and put both in here."""
    kinds = (*KINDS, Plan, PlanCosts, Report, Work, Claim, StepClues, HostClues, LinkClues)
    travels = {kind.__name__: list(kind.__annotations__.items()) for kind in kinds}

    assert (PROTOCOL, zlib.crc32(repr(travels).encode())) == (19, 1394025653)
