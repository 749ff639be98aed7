"""Who keeps the others waiting: a rank that lives, sends heartbeats, and does not come on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import monotonic

from ._channel import Message, StarChannel
from ._place import Place

# A rank that compiles lives; but compilers hang too.
COMPILING_TIMES = 3
_WARN_SHARE = 1 / 9


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look found.

    Attributes:
        step: the step that is waited for.
        missing: who has not finished it.
        elsewhere: whether all of those are known to wait for nobody, at the last look.
        warning: what a person should be told now.
        hung: who counts as hanging from now on, and why.
    """

    step: int
    missing: frozenset[int]
    elsewhere: bool
    warning: str | None = None
    hung: tuple[int, str] | None = None


class ProgressWatch:
    """Measures how long some ranks wait in a step for others that do not finish it.

    The clock of a step starts with the first rank that has finished it. So a pause that all ranks
    share (an evaluation, a checkpoint) is none here, however long, nor is a first step that all
    ranks compile. One that a single rank makes is, and ``hang_s`` has to be longer than that.
    A rank that is found inside a compiler is given three times as long.

    A pause of this process itself counts as two heartbeats: nobody else is late then.

    Args:
        hosts: host name of every rank.
        hang_s: seconds after which a rank counts as hanging; None is never.
        heartbeat_s: seconds between two looks.
    """

    def __init__(self, hosts: Sequence[str], *, hang_s: float | None, heartbeat_s: float) -> None:
        self._hosts = hosts
        self._hang_s = hang_s
        self._heartbeat_s = heartbeat_s
        self._seen_s: float | None = None
        self._step = -1
        self._waited_s = 0.0
        self._warned = False
        self._places: dict[int, Place] = {}

    def heard(self, rank: int, step: int, place: Place) -> None:
        """Take note of where a rank is that was asked about ``step``."""
        if step == self._step:
            self._places[rank] = place

    def look(self, now_s: float, awaited: tuple[int, frozenset[int]] | None) -> Finding | None:
        """Return what there is to find; None while nobody waits for long.

        Args:
            now_s: monotonic seconds.
            awaited: the oldest step that some ranks have finished, and who has not; None if there
                is none.
        """
        passed_s = 0.0 if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        if awaited is None or awaited[0] != self._step:
            self._step = -1 if awaited is None else awaited[0]
            self._waited_s, self._warned = 0.0, False
            self._places.clear()
            return None
        self._waited_s += min(passed_s, 2 * self._heartbeat_s)
        if self._waited_s < 3 * self._heartbeat_s:
            return None
        return self._judge(awaited[1])

    def _judge(self, missing: frozenset[int]) -> Finding:
        known = {rank: self._places[rank] for rank in sorted(missing) if rank in self._places}
        free = [rank for rank, place in known.items() if not place.in_collective]
        before = [rank for rank in free if not known[rank].past_backward]
        rank = (before or free or sorted(missing))[0]  # the others may be waiting for that one
        place = known.get(rank)
        elsewhere = len(before) == len(missing)
        if self._hang_s is None:
            return Finding(self._step, missing, elsewhere)
        where = f"it is {place.text}" if place else "where it is, it does not say"
        waits = f"has not finished step {self._step} for {self._waited_s:.0f} s while others wait"
        limit_s = self._hang_s * (COMPILING_TIMES if place and place.compiling else 1)
        if self._waited_s >= limit_s:
            slow = "if it was only slow, raise `Runtime(hang_s=...)`"
            hung = rank, f"it {waits}; {where} ({slow})"
            return Finding(self._step, missing, elsewhere, hung=hung)
        warning = None
        if self._waited_s >= 6 * self._heartbeat_s + self._hang_s * _WARN_SHARE:
            if not self._warned:
                warning = (
                    f"Rank {rank} on {self._hosts[rank]} {waits}; {where}. After {limit_s:g} s it "
                    f"counts as hanging: `Runtime(hang_s=...)`."
                )
            self._warned = True
        return Finding(self._step, missing, elsewhere, warning)


class Patrol:
    """One rank's side of the watch: rank 0 asks late ranks where they are, and tells the others.

    Args:
        rank: this process.
        hosts: host name of every rank.
        channel: connections to the others; None with one process.
        hang_s: seconds after which a rank counts as hanging; None is never.
        heartbeat_s: seconds between two looks.
        place_of: tells where a thread is, by its number.
        clock: monotonic seconds.

    Attributes:
        thread_id: the training thread's.
        backward_step: the newest step of which this process has ended a backward.
        heartbeat_s: as given.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        channel: StarChannel | None,
        *,
        hang_s: float | None,
        heartbeat_s: float,
        place_of: Callable[[int], Place],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.thread_id = 0
        self.backward_step = -1
        self._rank = rank
        self._ranks = frozenset(range(len(hosts)))
        self._channel = channel
        self.heartbeat_s = heartbeat_s
        self._place_of = place_of
        self._clock = clock
        self._watch = ProgressWatch(hosts, hang_s=hang_s, heartbeat_s=heartbeat_s)
        self._elsewhere = (-1, -math.inf)  # a step whose late ranks wait for nobody, and when

    def look(self, arrived: tuple[int, frozenset[int]] | None) -> tuple[int, str] | None:
        """On rank 0: look who keeps the others waiting; return who hangs, and why.

        Args:
            arrived: the oldest step that some ranks have finished, and who; None if there is none.
        """
        awaited = None if arrived is None else (arrived[0], self._ranks - arrived[1])
        finding = self._watch.look(self._clock(), awaited)
        if finding is None:
            return None
        for rank in finding.missing:
            if rank == self._rank:
                self._watch.heard(rank, finding.step, self._place(finding.step))
            else:
                self._send(rank, {"where": finding.step})
        if finding.elsewhere:
            self._elsewhere = finding.step, self._clock()
            for rank in self._ranks - finding.missing:
                self._send(rank, {"elsewhere": finding.step})
        if finding.warning:
            logging.getLogger("evenstep").warning("%s", finding.warning)
        return finding.hung

    def is_elsewhere(self, step: int) -> bool:
        """Tell whether those who have not finished ``step`` are known to wait for nobody."""
        known_step, known_s = self._elsewhere
        return known_step == step and self._clock() - known_s < 3 * self.heartbeat_s

    def received(self, peer: int, message: Message) -> bool:
        """Take in a message if it is about places; return whether it was."""
        match message:
            case {"where": step}:
                self._send(peer, {"at": step, "place": asdict(self._place(step))})
            case {"at": step, "place": place}:
                self._watch.heard(peer, step, Place(**place))
            case {"elsewhere": step}:
                self._elsewhere = step, self._clock()
            case _:
                return False
        return True

    def entered(self, backward_of: int | None, *, thread_id: int) -> None:
        """Note that the training thread enters a collective; of which step's backward, if any."""
        self.thread_id = thread_id
        if backward_of is not None:
            self.backward_step = backward_of

    def _place(self, step: int) -> Place:
        """Return where this process is, which was asked about ``step``."""
        past_backward = self.backward_step >= step
        return replace(self._place_of(self.thread_id), past_backward=past_backward)

    def _send(self, rank: int, message: Message) -> None:
        if self._channel is not None and rank != self._rank:
            self._channel.send(rank, message)
