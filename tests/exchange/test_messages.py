"""Every message arrives as it was sent, or is refused by an error that names what is wrong."""

import math
import zlib

import msgspec
import numpy as np
import pytest

from evenstep._diagnosis import HostClues, StepClues
from evenstep._exchange import _message_kinds as m
from evenstep._exchange._wire import PROTOCOL
from evenstep._planner import Plan, PlanCosts, Report, Work
from evenstep.claims._step_claims import Claim

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
    m.UnitsReport(3, 2.5),
    m.UnitsReply(3, 7),
    m.TimesReport(3, tuple(range(11))),
    m.CluesReport(3, StepClues(gc_us=4000, size=-7)),
    m.HostReport(HostClues(3, 1.0, cpu_s=0.9, throttled_s=0.25, major_faults=2)),
    m.ClaimRequest(1, 3, None, own=True),
    m.ClaimReply(1, (Claim(0, 2, 4), Claim(1, 0, 1))),
    m.NumbersReport((0, 1, 2), (3, 4)),
    m.NumbersReply((0, 1, 2), "<u1", b"\x07"),
    m.Reduced(0, 1, {3: 1.0, 4: None}, maybe=(5, 6)),
    m.StepsRequest((0, 1)),
    m.StepsReply((0, 1), (3,)),
    m.NotFiniteReport(3, is_half=True),
    m.ScalesReport(3, ((0, 1, 0.5, 20.0, 0.01),)),
    m.LossRefused("a sum"),
    m.ProgressReport({"steps": 3, "gloo group 0": 7}, is_paused=True, awaited={"loader 0": 2}),
    m.LocationRequest(),
    m.ThreadLocation("at train.py:3", in_collective=True, compiling=False),
    m.SharesReport(3, 1, math.inf, ((0, 1, 1e6, 0.5),), 0.1),
    m.SharesReport(3, 1, 0.5, None),
    m.SharesReply((1, 2, (1, 3), None, "why", None)),
    m.CollectiveBroke(3),
    m.RankLost(1, "it is gone"),
    m.RankLost(1, "it is gone", 136),
    m.RanksDiverged(1, "it did other batches"),
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
        ([["UnitsReport", 3, None]], "Expected `float`, got `None`"),
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
    data = m.written([m.UnitsReport(3, np.float64(2.5)), m.UnitsReport(4, np.float32(0.5))])
    assert m.read(data) == [m.UnitsReport(3, 2.5), m.UnitsReport(4, 0.5)]

    with pytest.raises(TypeError):
        m.written([m.UnitsReport(3, object())])


def test_the_version_stands_for_what_travels():
    """Where this fails, what ranks send has changed: count `PROTOCOL` up, and put both in here."""
    kinds = (*KINDS, Plan, PlanCosts, Report, Work, Claim, StepClues, HostClues)
    travels = {kind.__name__: list(kind.__annotations__.items()) for kind in kinds}

    assert (PROTOCOL, zlib.crc32(repr(travels).encode())) == (17, 2090467420)
