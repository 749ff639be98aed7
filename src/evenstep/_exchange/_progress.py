"""Who keeps the others waiting: a rank that lives, sends heartbeats, and does not come on.

Every rank counts what it has come to: steps reported, unit sums sent, and collectives begun in each
process group. Counts continue while a thread waits in a collective. A rank that waits in one has
begun it, and the one it waits for has not. So the rank that hangs is behind in a count, stands
still in all of them, and is ahead of no one. A rank that waits for a message says for which: the
one that has not sent it is behind, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic

from ._internal import say
from ._lost_ranks import LostRanks
from ._message_kinds import LocationRequest, Message, ProgressReport, ThreadLocation
from ._router import Router
from ._threads import Framework

# A rank that compiles lives; but compilers hang too.
COMPILING_TIMES = 3
_WARN_SHARE = 1 / 9
_CROSSED_S = 15.0
_LEAST_LOOKS = 3  # without a move, until a rank is late

STEPS, UNITS = "steps", "units"
_APART = (
    "and waits there itself, so it is not slow: ranks made different numbers of backwards or "
    "collectives. Make as many on all ranks; to skip a batch, skip it on all of them, by a shared "
    "decision such as `balancer.mean(bad) > 0`"
)
_OWN = {STEPS: "finished step {}", UNITS: "come to step {}"}  # all ranks count these alike
_MAIL = "message about "


Finding = tuple[int, tuple[int, ...], str, str]
"""What one look found: who keeps others waiting, and who may be waiting for it.

Then what to warn the user of now, and why that rank counts as lost from now on: it hangs, or has
failed. Each is empty where it does not apply.
"""


class HangDetector:
    """Measures how long a rank stands still while others are ahead of it.

    A pause that all ranks share (an evaluation, a checkpoint) is none here, however long: none is
    ahead. The clock starts with the first rank that is. A pause that a single rank makes counts,
    so ``hang_s`` has to be longer than that, or the script has to say that it pauses. A rank that
    is found inside a compiler is given three times as long.

    Process groups count sends and receives as well, in some backends, so that counts may come
    apart for good. A rank that is behind in those alone hangs only if one that is ahead of it is
    seen in a collective.

    A rank that waits for its next batch while all others wait for it in a collective is not slow:
    it has left a backward out. Its run ends at once. Where all wait in collectives, two of them
    each for the other, as one has called ``balancer.mean`` or ``barrier`` alone, say, it ends after
    15 s: neither will come, but counts that came apart for good look like that in a slow
    collective.

    A pause of this process itself counts as two heartbeats: the others are not late by that.

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
        self._progress = [ProgressReport() for _ in hosts]
        self._moved: set[int] = set()
        self._late_s = dict.fromkeys(range(len(hosts)), 0.0)  # behind, and without a move
        self._places: dict[int, ThreadLocation] = {}
        self._warned: set[int] = set()
        self._left: set[int] = set()
        self._failed: dict[int, tuple[int, str]] = {}

    def take(self, rank: int, progress: ProgressReport) -> None:
        """Take in how far a rank has come."""
        if progress != self._progress[rank]:
            self._progress[rank] = progress
            self._moved.add(rank)

    def found(self, rank: int, place: ThreadLocation) -> None:
        """Take in where a rank is that was asked."""
        self._places[rank] = place

    def left(self, rank: int, failed: tuple[int, str] | None = None) -> None:
        """Note that a rank has ended its run: it is behind in nothing, unless it failed.

        Args:
            rank: which one.
            failed: who is to blame, and why, if it was an error that ended its run.
        """
        if failed is None:
            self.take(rank, ProgressReport())
            self._left.add(rank)
        else:
            self._failed[rank] = failed

    def look(self, now_s: float) -> Finding | None:
        """Return what there is to find; None while no rank waits for long.

        Args:
            now_s: monotonic seconds.
        """
        passed_s = 0.0 if self._seen_s is None else now_s - self._seen_s
        passed_s, self._seen_s = min(passed_s, 2 * self._heartbeat_s), now_s
        behind = self._behind()
        for rank in self._moved:
            self._places.pop(rank, None)
            self._warned.discard(rank)
        for rank, late_s in self._late_s.items():
            stands = rank in behind and rank not in self._moved
            self._late_s[rank] = late_s + passed_s if stands else 0.0
        self._moved.clear()
        least_s = _LEAST_LOOKS * self._heartbeat_s
        late = [rank for rank in behind if self._late_s[rank] >= least_s]
        for rank in late:
            if rank in self._failed:
                return self._judge_failed(rank, behind[rank])
        if self._hang_s is None:
            return None
        cause = self._first_cause({rank: behind[rank] for rank in late})
        return None if cause is None else self._judge(cause, behind[cause], self._hang_s)

    def _behind(self) -> dict[int, set[str]]:
        """Return who is behind, and in which counts."""
        newest: dict[str, int] = {}
        for progress in self._progress:
            for name, count in progress.counts.items():
                newest[name] = max(count, newest.get(name, count))
        behind = {
            rank: {name for name, count in progress.counts.items() if count < newest[name]}
            | self._unsent(rank)
            for rank, progress in enumerate(self._progress)
            if rank not in self._left
        }
        return {rank: names for rank, names in behind.items() if names}

    def _unsent(self, rank: int) -> set[str]:
        """Return what ``rank`` has not sent and others wait for: rank 0, and all for rank 0."""
        sent = self._progress[rank].sent
        waiting = self._progress[:1] if rank else self._progress[1:]
        return {
            _MAIL + name
            for progress in waiting
            for name, count in progress.awaited.items()
            if sent.get(name, 0) < count
        }

    def _first_cause(self, late: Mapping[int, set[str]]) -> int | None:
        """Return who is late and waits for no other: the others may be waiting for that one."""
        if not late:
            return None
        in_groups = {rank: {n for n in names if not _is_own(n)} for rank, names in late.items()}
        # Who has finished a step may be late for a collective after it, and hold up another's step.
        # Who owes only a message may wait for a step itself.
        in_steps = [rank for rank, names in late.items() if names & _OWN.keys()]
        candidates = [rank for rank in late if in_groups[rank]] or in_steps or list(late)
        free = [
            rank
            for rank in candidates
            if not any(self._is_ahead(rank, other, in_groups[other]) for other in late)
        ]
        if any(self._progress[rank].is_paused for rank in late):
            free = [rank for rank in free if not self._progress[rank].is_paused]
            candidates = []  # the rest wait for the one that pauses
        of = free or candidates
        return min(of, key=lambda rank: (self._is_waiting(rank), rank), default=None)

    def _is_ahead(self, rank: int, other: int, names: set[str]) -> bool:
        ours, theirs = self._progress[rank].counts, self._progress[other].counts
        return any(ours.get(name, count) > count for name, count in theirs.items() if name in names)

    def _is_waiting(self, rank: int) -> bool:
        place = self._places.get(rank)
        return place is not None and place.in_collective

    def _judge(self, rank: int, names: set[str], hang_s: float) -> Finding:
        waiting = self._ahead_of(rank, names)
        place, late_s = self._places.get(rank), self._late_s[rank]
        where = f"it is {place.text}" if place else "its position is unknown"
        waits = f"has not {self._next_of(rank, names)} for {late_s:.0f} s while others wait"
        limit_s = hang_s * (COMPILING_TIMES if place and place.compiling else 1)
        is_certain = any(map(_is_own, names)) or any(map(self._is_waiting, waiting))
        is_apart = place is not None and (place.awaits_message or place.in_collective)
        others = [other for other in range(len(self._hosts)) if other not in {rank, *self._left}]
        crossed = self._crossed(rank, others)
        if crossed is not None:
            where += f", and rank {crossed} is {self._places[crossed].text}"
        if place is not None and all(map(self._is_waiting, others)):
            if place.awaits_message:
                limit_s = 0.0
            elif crossed is not None:
                limit_s = min(limit_s, _CROSSED_S)
        if late_s >= limit_s and is_certain:
            why = _APART if is_apart else "(if it was only slow, raise `Runtime(hang_s=...)`)"
            return rank, waiting, "", f"it {waits}; {where} {why}"
        warning = ""
        if late_s >= 6 * self._heartbeat_s + hang_s * _WARN_SHARE:
            if rank not in self._warned:
                warning = (
                    f"Rank {rank} on {self._hosts[rank]} {waits}; {where}. After {limit_s:g} s it "
                    f"counts as hanging: `Runtime(hang_s=...)`."
                )
            self._warned.add(rank)
        return rank, waiting, warning, ""

    def _crossed(self, rank: int, others: Sequence[int]) -> int | None:
        """Return who waits in one collective while ``rank`` waits in another: neither will come.

        In another group, or in another call of the same one.
        """
        groups = {name for name in self._progress[rank].counts if not _is_own(name)}
        for other in filter(self._is_waiting, others if self._is_waiting(rank) else ()):
            calls = {self._places[rank].call, self._places[other].call}
            if self._is_ahead(rank, other, groups) and self._is_ahead(other, rank, groups):
                return other
            if "" not in calls and len(calls) == 2:
                return other
        return None

    def _judge_failed(self, rank: int, names: set[str]) -> Finding:
        """Return that a rank is lost which ended its run by an error, if one waits for it."""
        waiting = self._ahead_of(rank, names)
        culprit, problem = self._failed[rank]
        return culprit, waiting, "", problem if any(map(self._is_waiting, waiting)) else ""

    def _ahead_of(self, rank: int, names: set[str]) -> tuple[int, ...]:
        everyone = range(len(self._hosts))
        return tuple(other for other in everyone if self._is_ahead(other, rank, names))

    def _next_of(self, rank: int, names: set[str]) -> str:
        """Return what a rank has not come to: a step, as people count, or a collective."""
        name = next((own for own in _OWN if own in names), min(names))
        if name.startswith(_MAIL):
            return f"sent a {name}"
        count = self._progress[rank].counts[name] + 1
        return _OWN.get(name, f"come to collective {{}} of {name}").format(count)


class ProgressReporter:
    """One rank's side of the watch: it reports to rank 0 how far it is, and where, if asked.

    Args:
        router: carries messages.
        hosts: host name of every rank.
        framework: knows where a thread is, and how many collectives have begun. Those up to now
            do not count.
        lost_ranks: knows who has ended its run, and which thread trains.
        hang_s: seconds after which a rank counts as hanging; None is never.
        heartbeat_s: seconds between two looks.

    Attributes:
        counts: to which step this rank has come, in each of the counts that are our own.
    """

    kinds = (ProgressReport, LocationRequest, ThreadLocation)

    def __init__(
        self,
        router: Router,
        hosts: Sequence[str],
        framework: Framework,
        *,
        lost_ranks: LostRanks,
        hang_s: float | None,
        heartbeat_s: float,
    ) -> None:
        self._router = router
        self._framework = framework
        self._lost_ranks = lost_ranks
        self._is_paused = False
        self._first = dict(framework.num_collectives())
        self._begun: dict[str, int] = {}  # also in groups that were destroyed: others may wait
        self.counts: dict[str, int] = {}
        self._sent = ProgressReport()
        self._num_still = 0  # looks since this rank has moved
        self._watch = HangDetector(hosts, hang_s=hang_s, heartbeat_s=heartbeat_s)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Have this rank work alone for the time of the block."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def look(self) -> tuple[int, str] | None:
        """Report how far this rank is; return for whom others wait in vain, and why."""
        progress = self._own_progress()
        self._num_still += 1
        if progress != self._sent:
            self._sent, self._num_still = progress, 0
            self._router.to_leader(progress)
        if self._router.rank != 0:
            return self._look_at_leader()
        for rank in tuple(self._lost_ranks.left):
            self._watch.left(rank, self._lost_ranks.failure_of(rank))
        finding = self._watch.look(monotonic())
        if finding is None:
            return None
        late, waiting, warning, hung = finding
        for rank in (late, *waiting):
            self._router.to(rank, LocationRequest())
        if warning:
            say("%s", warning)
        return (late, hung) if hung else None

    def _look_at_leader(self) -> tuple[int, str] | None:
        """Return who is to blame if an error has ended rank 0's run and this rank waits for it.

        Rank 0 sees to all other waits. Without it, there is no other step.
        """
        if self._num_still < _LEAST_LOOKS or 0 not in self._lost_ranks.left:
            return None
        waits = self._framework.place_of(self._lost_ranks.thread_id).in_collective
        return self._lost_ranks.failure_of(0) if waits else None

    def received(self, peer: int, message: Message) -> None:
        """Take in how far a rank is, or where; or say where this one is."""
        match message:
            case ProgressReport():
                self._watch.take(peer, message)
            case LocationRequest():
                self._router.to(peer, self._framework.place_of(self._lost_ranks.thread_id))
            case ThreadLocation():
                self._watch.found(peer, message)

    def _own_progress(self) -> ProgressReport:
        self._begun |= self._framework.num_collectives()
        since = {name: count - self._first.get(name, 0) for name, count in self._begun.items()}
        mail = dict(self._router.sent), dict(self._router.awaited)  # other threads change them
        return ProgressReport(since | self.counts, self._is_paused, *mail)


def _is_own(name: str) -> bool:
    """Return whether a count is one of evenstep's own, and so exact."""
    return name in _OWN or name.startswith(_MAIL)
