"""How all ranks come to stop after the same step."""

from __future__ import annotations

from ._message_kinds import Answer, Message, StopAsked


class Stop:
    """What a rank knows of a stop: it travels with the messages of the steps.

    A rank that wants one tells rank 0, which has all of them know with its next answer.

    Attributes:
        told: whether this very process was told to end.
        asked: whether a rank known here wants to stop.
        after: the answer from which on all ranks know; None as long as there is none.
    """

    kinds = (StopAsked,)

    def __init__(self) -> None:
        self.told = False
        self.asked = False
        self.after: int | None = None

    def ask(self) -> None:
        """Have all ranks stop. May be called from a signal handler."""
        self.told = self.asked = True

    def received(self, peer: int, message: Message) -> None:
        """On rank 0: take in that a rank wants to stop."""
        self.asked = True

    def answer(self, index: int, due: int, done: int) -> Answer:
        """On rank 0: return the answer to some steps, which has all ranks know."""
        if self.asked and self.after is None:
            self.after = index
        return Answer(index, due, done, self.after is not None)

    def hear(self, answer: Answer) -> None:
        """Elsewhere: take in an answer."""
        if answer.stops and self.after is None:
            self.after = answer.index
