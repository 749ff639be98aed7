"""Every message arrives as it was sent, or is refused by an error that names what is wrong."""

import math
import zlib
from typing import get_args

import pytest

from evenstep._diagnosis import HostClues, StepClues
from evenstep._exchange import _message_kinds as m
from evenstep._exchange._record import MessageError
from evenstep._exchange._wire import PROTOCOL, decode, encode
from evenstep._planner import Plan, PlanCosts, Report, Work
from evenstep.claims._step_claims import Claim

KINDS = get_args(m.Message)
REPORT = Report(3, 8, 16, 0.1, 0.0, wall_s=math.inf, holds=True, limit=None, free_cpu=0.5)
EXAMPLES = [
    m.StepReports(3, (REPORT, REPORT._replace(wall_s=None, fault="no clock"))),
    m.StepReports(4, ()),
    m.PlanAsked(3),
    m.PlanTold(Plan(1, 2, (3, 4), tail=(0, 1), reason="why")),
    m.Answer(3, 5),
    m.Answer(3, 5, 3, stops=True),
    m.HoldNothing(),
    m.StopAsked(),
    m.DoneAsked(3),
    m.DoneTold(3),
    m.UnitsTold(3, 2.5),
    m.UnitsSummed(3, 7),
    m.TimesTold(3, tuple(range(11))),
    m.CluesTold(3, StepClues(gc_us=4000, size=-7)),
    m.HostTold(HostClues(3, 1.0, cpu_s=0.9, throttled_s=0.25, major_faults=2)),
    m.ClaimAsked(1, 3, None, own=True),
    m.ClaimGranted(1, (Claim(0, 2, 4), Claim(1, 0, 1))),
    m.NumbersTold((0, 1, 2), (3, 4)),
    m.NumbersPosted((0, 1, 2), "<u1", "Bw=="),
    m.Reduced(0, 1, {3: 1.0, 4: None}, maybe=(5, 6)),
    m.StepsAsked((0, 1)),
    m.StepsTold((0, 1), (3,)),
    m.NotFiniteTold(3, is_half=True),
    m.ScalesTold(3, ((0, 1, 0.5, 20.0, 0.01),)),
    m.LossRefused("a sum"),
    m.ProgressTold({"steps": 3, "gloo group 0": 7}, is_paused=True, awaited={"loader 0": 2}),
    m.PlaceAsked(),
    m.Place("at train.py:3", in_collective=True, compiling=False),
    m.SharesSeen(3, 1, math.inf, ((0, 1, 1e6, 0.5),), 0.1),
    m.SharesSeen(3, 1, 0.5, None),
    m.SharesTold((1, 2, (1, 3), None, "why", None)),
    m.CollectiveBroke(3),
    m.RankLost(1, "it is gone"),
    m.RankLost(1, "it is gone", 136),
    m.RanksDiverged(1, "it did other batches"),
    m.Goodbye(3, 2, 1),
    m.Goodbye(3, 2, 1, (2, "it raised")),
]


def sent(rows):
    """What arrives of rows that were sent."""
    return decode(encode(rows).data)


def test_all_messages_arrive_as_they_were_sent():
    """In one piece and in order; there is an example of every kind here."""
    assert m.read(sent(m.written(EXAMPLES))) == EXAMPLES
    assert {type(example) for example in EXAMPLES} == set(KINDS)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["LaterKind", 3]], "LaterKind"),
        ([["DoneTold"]], "`DoneTold` must have step, got"),
        ([["DoneTold", 3, 4]], "`DoneTold` must have step, got"),
        ([["HoldNothing", 1]], "`HoldNothing` must have no fields"),
        ([["DoneTold", 3.5]], "`DoneTold.step`: must be int, got 3.5"),
        ([["DoneTold", True]], "`DoneTold.step`: must be int, got True"),
        ([["UnitsTold", 3, None]], "`UnitsTold.units`: must be float, got None"),
        ([["Answer", 1, 2, 1, "1"]], "`Answer.stops`: must be bool, got '1'"),
        ([["StepReports", 3, [[3, 8]]]], "`StepReports.reports`: `Report` must have step, batch"),
        ([["StepReports", 3, [3]]], "`StepReports.reports`: "),
        (
            [["PlanTold", [1, 2, "34", None, None, None, "", None, None]]],
            "`Plan.batch_size`: must be",
        ),
        ([["PlanTold", [1, 2, [3, "4"], None, None, None, "", None, None]]], "got [3, '4']"),
        ([["TimesTold", 3, [1.5] * 11]], "`TimesTold.spent_us`: must be"),
        ([["StepsAsked", [0]]], "`StepsAsked.key`"),
        ([["ProgressTold", [], False, {}, {}]], "`ProgressTold.counts`: must be"),
        ([["Reduced", 0, 1, {"x": 1.0}, [], 0]], "`Reduced.shares`"),
        ({"step": 3}, "is no list of known messages"),
        ([3], "is no list of known messages"),
        (None, "is no list of known messages"),
    ],
)
def test_what_is_not_known_is_named(rows, words):
    """The kind, or the field with its type and what came."""
    with pytest.raises(MessageError) as caught:
        m.read(sent(rows))

    assert words in str(caught.value)


def test_the_version_stands_for_what_travels():
    """Where this fails, what ranks send has changed: count `PROTOCOL` up, and put both in here."""
    kinds = (*KINDS, Plan, PlanCosts, Report, Work, Claim, StepClues, HostClues)
    travels = {kind.__name__: list(kind.__annotations__.items()) for kind in kinds}

    assert (PROTOCOL, zlib.crc32(repr(travels).encode())) == (16, 1433801616)
