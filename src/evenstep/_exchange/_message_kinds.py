"""Every message between ranks: its fields and types, how it is written, and how it is read.

A connection carries lists of messages in MessagePack, each an array of its kind's name and its
fields. What is read is checked: an unknown kind or a field of another type is an error that says
where. A change of a kind counts ``PROTOCOL`` up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Union, dataclass_transform

from msgspec import DecodeError, Struct, field, msgpack

from .._diagnosis import HostClues, StepClues
from .._planner import Plan, Report
from ..claims._step_claims import Claim

MailKey = tuple[int, int, int]
"""Whose integers, of which round, and which of them."""

ReductionKey = tuple[int, int]
"""A model's number, and that of its reduction."""

ScaleRow = tuple[int, int, float, float, float]
"""Model, output, scale, size and variance, as in ``ScalesReport``."""


class MessageError(ValueError):
    """What came is no message that this version of evenstep knows."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What one rank sends to another."""


class StepReports(Message):
    """To rank 0: a rank has done ``step``, with the measurements that are complete by then."""

    step: int
    reports: tuple[Report, ...]


class TimesReport(Message):
    """To rank 0: where the time of a rank went in a step that is over.

    Attributes:
        step: the step.
        spent_us: microseconds in each ``Phase``.
        clues: what the rank noticed beside them; None where that is nothing.
        host: what its process and machine went through, once a second or so.
    """

    step: int
    spent_us: tuple[int, ...]
    clues: StepClues | None = None
    host: HostClues | None = None


class PlanRequest(Message):
    """To rank 0: a rank asks for the answer to step ``index`` before it has reported it."""

    index: int


class PlanReply(Message):
    """From rank 0: a new plan, in force from the next answer on."""

    plan: Plan


class Answer(Message):
    """From rank 0: the newest plan answers step ``index``, and those after it until one is due.

    Attributes:
        index: the first step that is answered.
        due: the step after whose reports the next plan is decided, and up to which all are sent
            then. Not after ``index`` where a rank has asked ahead: that is all that is answered.
        done: the newest step that all ranks have reported; -1 if there is none.
        stops: whether all ranks stop as of this answer.
    """

    index: int
    due: int
    done: int = -1
    stops: bool = False


class HoldNothing(Message):
    """From rank 0: a rank waits for what others reduced, so that no report may be held."""


class StopRequest(Message):
    """To rank 0: a rank wants all to stop after the same step."""


class DoneRequest(Message):
    """To rank 0: a rank waits until all have reported ``step``."""

    step: int


class DoneReply(Message):
    """From rank 0: all ranks have reported ``step``."""

    step: int


class Units(Message):
    """To rank 0: a rank's units of a step. From it: those over all ranks."""

    step: int
    units: float


class ClaimRequest(Message):
    """To rank 0: a rank claims what is left of a step.

    Attributes:
        number: of the claim, which its answer repeats: one that was broken off may come later.
        step: the step.
        speed: samples per second of the rank's newest samples in it, if there were any.
        own: whether to get all that is left of the rank's own part.
    """

    number: int
    step: int
    speed: float | None
    own: bool


class ClaimReply(Message):
    """From rank 0: what the rank computes next; nothing if it is done."""

    number: int
    claims: tuple[Claim, ...]


class NumbersReport(Message):
    """To rank 0: a rank's numbers, which all get once all have sent theirs."""

    key: MailKey
    numbers: tuple[int, ...]


class NumbersReply(Message):
    """From rank 0: integers, as the bytes of an array of ``kind``."""

    key: MailKey
    kind: str
    data: bytes


class Reduced(Message):
    """To rank 0: what one rank put into one reduction of a model's gradients.

    Attributes:
        model: number of the model, in the order of ``prepare``.
        number: of the reduction, counted for each model.
        shares: by step, how much of the rank's batch went in: 1 is all of it once, 2 is twice;
            None where that is not known.
        maybe: steps of which some went in, whose batches weigh alike: which ones is not known.
        checksum: of who has which sample of those steps; 0 where that is not known.
    """

    model: int
    number: int
    shares: Mapping[int, float | None]
    maybe: tuple[int, ...] = ()
    checksum: int = 0


class StepsRequest(Message):
    """To rank 0: a rank asks which steps a reduction may be of."""

    key: ReductionKey


class StepsReply(Message):
    """From rank 0: the steps that a reduction may be of, as far as other ranks know."""

    key: ReductionKey
    steps: tuple[int, ...]


class NotFiniteReport(Message):
    """To rank 0: a rank's loss was not finite in ``step``, as seen in half precision or not."""

    step: int
    is_half: bool


class ScalesReport(Message):
    """To rank 0: the scales of the gradients at the models' outputs in a step of a rank.

    Attributes:
        step: the step.
        rows: model, output, sum of absolute values, samples or other units behind it, and the
            variance of its logarithm. Of several parts of a batch it is the geometric mean.
    """

    step: int
    rows: tuple[ScaleRow, ...]


class ProgressReport(Message):
    """To rank 0: how far a rank has come.

    Attributes:
        counts: what it has come to, by name: steps, unit sums, collectives of process groups.
        is_paused: whether it works alone for a while, as its script says.
        sent: how many messages of each name it has sent that are no collective.
        awaited: for which of them it waits: rank 0 for those of all, the others for rank 0's.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    is_paused: bool = False
    sent: Mapping[str, int] = field(default_factory=dict)
    awaited: Mapping[str, int] = field(default_factory=dict)


class LocationRequest(Message):
    """From rank 0: a rank that keeps others waiting, or waits, is asked where it is."""


class ThreadLocation(Message):
    """To rank 0: where a thread is.

    Attributes:
        text: the innermost line of the user's own, for people.
        in_collective: whether it may be waiting for others. False is no proof: a wait for a work in
            flight has no Python frame of its own.
        compiling: whether it is inside a compiler.
        awaits_message: whether it waits for a message of another rank, as for the next batch's
            plan.
        call: which collective of the framework's its own line waits in, as ``"barrier"``; empty
            where that is none, or not known.
    """

    text: str
    in_collective: bool
    compiling: bool
    awaits_message: bool = False
    call: str = ""


ENDED = ThreadLocation("past its training thread's end", in_collective=False, compiling=False)


class SharesReport(Message):
    """To rank 0: what one rank saw of the exchange of gradients in one step, over unequal links.

    Attributes:
        step: the step.
        plan_epoch: the plan of shares it ran under.
        waited_s: from the end of its own backward to the last sum; infinite for a server.
        rows: sender, receiver, bytes and seconds of what came; None for plain all-reduce.
        lasted_s: from the first bytes that came to the last; 0 if nothing did.
        spent_s: from the plan point of the step to the end of its own backward.
    """

    step: int
    plan_epoch: int
    waited_s: float
    rows: tuple[tuple[int, int, float, float], ...] | None
    lasted_s: float = 0.0
    spent_s: float = 0.0


class SharesReply(Message):
    """From rank 0: a plan of who sums which part of the gradients, as ``SharesInForce`` has it."""

    plan: tuple[int, int, tuple[int, ...] | None, float | None, str, int | None]


class CollectiveBroke(Message):
    """To rank 0: a collective broke on a rank."""


class RankLost(Message):
    """To rank 0 and from it: a rank was lost.

    Attributes:
        rank: who was.
        problem: the reason.
        done: the newest step that all ranks have done, as rank 0 knows it, so that all say the
            same; another rank does not know.
    """

    rank: int
    problem: str
    done: int = -1


class GradientsWrong(Message):
    """From rank 0: gradients were wrong, so the run ends.

    Attributes:
        text: what happened, and what to do.
        rank: the one that differs from most, where ranks reduced mismatched gradients together;
            None where the loss is not what the user declared.
    """

    text: str
    rank: int | None = None


class Goodbye(Message):
    """To rank 0 and from it: a rank has ended its run.

    Attributes:
        last_step: the last step that it reported.
        last_used: the last of these that it used: the end may come between fetch and backward.
        num_loops: over its loaders.
        failed: who is to blame, the rank itself or one that it lost, and what ended it in words
            that follow "Rank 1 on node7 was lost: "; None if nothing did.
    """

    last_step: int
    last_used: int
    num_loops: int
    failed: tuple[int, str] | None = None


def written(messages: Sequence[Message]) -> bytes:
    """Return messages as a connection carries them."""
    return _WRITER.encode(messages)


def read(data: bytes | bytearray) -> list[Message]:
    """Return the messages that came over a connection.

    Raises:
        MessageError: one is of no known kind, or has a field of another type.
    """
    try:
        return _READER.decode(data)
    except DecodeError as error:
        raise MessageError(f"{error} in {bytes(data[:_LONGEST])!r}") from None


_LONGEST = 80  # bytes of a message in an error
_WRITER = msgpack.Encoder(enc_hook=float)  # numpy has floats of its own
_KINDS: Any = Union[tuple(Message.__subclasses__())]  # noqa: UP007  # as many as there are
_READER = msgpack.Decoder(list[_KINDS])
