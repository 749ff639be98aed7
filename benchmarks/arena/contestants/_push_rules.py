"""When a parameter server uses a gradient, and when it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, final


@dataclass(frozen=True, slots=True)
class Pushes:
    """Where all workers stand.

    Attributes:
        clock: gradients that each worker has pushed, by rank.
        waiting: workers that have pushed and got no answer yet, oldest first.
        version: of the model, the updates so far.
        answered: the version that each worker got last, by rank.
    """

    clock: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    version: int = 0
    answered: tuple[int, ...] = ()

    @classmethod
    def start(cls, world_size: int) -> Pushes:
        """Return what all workers begin with: version 0, and nothing pushed."""
        return cls(clock=(0,) * world_size, answered=(0,) * world_size)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a gradient that was pushed.

    Attributes:
        pushes: where all workers stand afterwards.
        uses: whether it is added to those that wait for the next update.
        updates: whether the model is updated now, by all that were added.
        answers: workers that get the model now.
    """

    pushes: Pushes
    uses: bool
    updates: bool
    answers: tuple[int, ...]


class PushRule(Protocol):
    """A rule of a parameter server: SSP, ASP, N-soft, backup workers."""

    def pushed(self, pushes: Pushes, rank: int) -> Verdict:
        """Return what becomes of a gradient of ``rank``."""
        ...

    def weight(self, world_size: int) -> float:
        """Return what each gradient that is used weighs in its update."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Stale:
    r"""Every gradient updates the model when it comes, $w \leftarrow w - \eta g_i / K$.

    A worker at clock $c$ goes on if and only if the slowest is at $c - s$ or later (SSP). With
    $s = 0$ that is plain synchronous SGD. Without a bound it is ASP. $K$ gradients move the model
    as far as one of plain DDP, so that learning rates are comparable.

    Args:
        bound: $s$, at least 0; None is no bound.

    References:
        Q. Ho et al., *More effective distributed ML via a stale synchronous parallel parameter
        server*, NeurIPS 2013.
    """

    bound: int | None = None

    def pushed(self, pushes: Pushes, rank: int) -> Verdict:
        clock = _counted(pushes.clock, rank)
        waiting = (*pushes.waiting, rank)
        floor = min(clock)
        answers = tuple(
            each for each in waiting if self.bound is None or clock[each] - self.bound <= floor
        )
        return Verdict(_after(pushes, clock, waiting, answers, is_new=True), True, True, answers)

    def weight(self, world_size: int) -> float:
        return 1 / world_size


@final
@dataclass(frozen=True, slots=True)
class FirstFew:
    r"""The model is updated by the mean of the first $N$ gradients that come.

    Who has pushed waits for that update. Late gradients count in a later group, stale (N-soft),
    or, with ``drops_stale``, not at all: the parameter-server form of $K - N$ backup workers,
    where a worker that is always late never counts. With $N = K$ either is plain synchronous SGD.
    Each update has the learning rate of plain DDP, so a sample of N-soft moves the model $K / N$
    times as far.

    Args:
        num_needed: $N$, from 1 to the number of workers.
        drops_stale: whether a gradient of an older model is thrown away.

    References:
        W. Zhang et al., *Staleness-aware async-SGD*, IJCAI 2016 (N-softsync); J. Chen et al.,
        *Revisiting distributed synchronous SGD*, arXiv:1604.00981 (backup workers).
    """

    num_needed: int
    drops_stale: bool = False

    def pushed(self, pushes: Pushes, rank: int) -> Verdict:
        clock = _counted(pushes.clock, rank)
        if self.drops_stale and pushes.answered[rank] < pushes.version:
            waiting = (*pushes.waiting, rank)
            after = _after(pushes, clock, waiting, (rank,), is_new=False)
            return Verdict(after, False, False, (rank,))
        waiting = (*pushes.waiting, rank)
        is_full = len(waiting) == self.num_needed
        answers = waiting if is_full else ()
        return Verdict(
            _after(pushes, clock, waiting, answers, is_new=is_full), True, is_full, answers
        )

    def weight(self, world_size: int) -> float:
        return 1 / self.num_needed


def _counted(clock: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (*clock[:rank], clock[rank] + 1, *clock[rank + 1 :])


def _after(
    pushes: Pushes,
    clock: tuple[int, ...],
    waiting: tuple[int, ...],
    answers: tuple[int, ...],
    *,
    is_new: bool,
) -> Pushes:
    version = pushes.version + is_new
    return replace(
        pushes,
        clock=clock,
        waiting=tuple(each for each in waiting if each not in answers),
        version=version,
        answered=tuple(
            version if each in answers else old for each, old in enumerate(pushes.answered)
        ),
    )
