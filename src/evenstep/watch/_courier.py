"""Carries each rank's records to rank 0, which makes rows, a diagnosis and lines of them."""

from __future__ import annotations

import math
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, perf_counter, thread_time
from typing import Any, TextIO, final

import numpy as np

from .._diagnosis import Cause, Diagnoser, HostClues, Phase, accounted
from .._telemetry import JsonLines, versions_here
from ..events import Event, RunEnded, RunStarted, StepMeasured, WaitingDiagnosed
from ._advice_text import advice_notes, kept_change
from ._long_steps import long_steps, under_way, usual_s
from ._start_watch import SUMMARY, WatchSettings
from ._step_records import RankMail, RankMerger, RankReport, Row, StepRecord, grouped, joined
from ._watched_run import CallSite

_SHORT_S = 0.01
_LEAST_LOST = 0.005  # of the time: less is 0 % in words
_WORDS = {
    Cause.SLOW_WORKER: "compute",
    Cause.THROTTLING: "throttling",
    Cause.CONTENTION: "contention",
    Cause.SLOW_BACKWARD: "a slow backward",
    Cause.INPUT: "input",
    Cause.NETWORK: "the network",
    Cause.GARBAGE_COLLECTION: "garbage collection",
    Cause.CHECKPOINT: "a checkpoint",
    Cause.LOGGING: "what the loop does there alone, such as logging",
    Cause.LENGTHS: "the lengths of samples",
    Cause.ROTATING: "changing ranks, and nothing that is measured says why",
    Cause.COMPILATION: "compilation",
    Cause.MEMORY: "memory pressure",
}


def who(rank: int, hosts: Sequence[str]) -> str:
    """Return a rank with its host, where that is known."""
    host = hosts[rank] if rank < len(hosts) else ""
    return f"rank {rank} ({host})" if host else f"rank {rank}"


def sentence(diagnosis: WaitingDiagnosed, hosts: Sequence[str]) -> str:
    """Return who waits for whom and why, in one sentence."""
    if not diagnosis.num_steps:
        return f"{diagnosis.no_verdict}."
    waiting = f"{100 * diagnosis.waiting_share:.0f} % of the time is waiting"
    if diagnosis.causes and _is_short(diagnosis):
        return (
            f"{waiting}, as in most steps of {1000 * diagnosis.step_s:.2g} ms: an exchange takes "
            "some milliseconds by itself."
        )
    if not diagnosis.causes:
        return f"{waiting}: {diagnosis.no_verdict}." if diagnosis.no_verdict else f"{waiting}."
    both = zip(diagnosis.causes, diagnosis.ranks, strict=True)
    reasons = [_because(cause, rank, hosts) for cause, rank in both]
    return f"{waiting}, {'; '.join(reasons[:3])}."


def _is_short(diagnosis: WaitingDiagnosed) -> bool:
    """Return whether steps are too short to say more than that ranks exchange something."""
    return diagnosis.step_s < _SHORT_S and diagnosis.causes[0] == Cause.NETWORK


def _because(cause: str, rank: int, hosts: Sequence[str]) -> str:
    reason = f"because of {_WORDS[Cause(cause)]}"
    return reason if rank < 0 else f"for {who(rank, hosts)}, {reason}"


def summary(
    diagnosis: WaitingDiagnosed,
    hosts: Sequence[str],
    notes: Sequence[str] = (),
    *,
    long: Sequence[str] = (),
) -> str:
    """Return what is said at the end, as lines.

    Args:
        diagnosis: of the whole run.
        hosts: of the ranks.
        notes: more lines, such as what to change.
        long: sentences on single long steps, which means hide.
    """
    lines = [sentence(diagnosis, hosts)]
    if diagnosis.num_steps:
        lines[0] = f"{diagnosis.num_steps} steps, {diagnosis.step_s:.3g} s each: {lines[0]}"
    lines += long
    is_short = bool(diagnosis.causes) and _is_short(diagnosis)
    columns = diagnosis.causes, diagnosis.ranks, diagnosis.lost_share
    said = diagnosis.evidence, diagnosis.remedy
    for cause, rank, share, evidence, remedy in zip(*columns, *said, strict=True):
        where = "" if rank < 0 else f" of {who(rank, hosts)}"
        if share >= _LEAST_LOST and not is_short:
            heading = f"  {cause}{where}, {100 * share:.0f} % of the time"
            lines += [f"{heading}: {evidence}", f"    {remedy}"]
    return "".join(f"evenstep watch: {line}\n" for line in (*lines, *notes))


_LEAST_US = 100_000  # of rank 0 in one event
_MOST_ROWS = 4096
_TOO_FEW = "evenstep watch: too few steps were seen. An optimizer's `step()` ends one.\n"
_DEEPSPEED = (
    "evenstep watch: DeepSpeed's engine is not watched, and no DDP or FSDP model was made. A "
    "`Balancer` measures it: docs/loops.md.\n"
)
_NO_MODEL = "evenstep watch: no DDP or FSDP model was made: nothing was watched.\n"


@final
class WatchLeader:
    """Takes in the ranks' reports; writes events, lines and the summary. In one thread at a time.

    Args:
        world_size: number of ranks.
        settings: of the watch.
        now: a monotonic clock in seconds.
        stream: where lines go.
    """

    def __init__(
        self,
        world_size: int,
        settings: WatchSettings,
        *,
        now: Callable[[], float] = monotonic,
        stream: TextIO = sys.stderr,
    ) -> None:
        self._world_size, self._settings = world_size, settings
        self._now, self._stream = now, stream
        self._merger = RankMerger(world_size)
        self._diagnoser = Diagnoser(world_size)
        self._hosts, self._devices = [""] * world_size, [""] * world_size
        self._rows: deque[Row] = deque(maxlen=_MOST_ROWS)
        self._unwritten: list[Row] = []
        self._wall_s: float | None = None  # of a step, in what was written last
        self._run_dir = settings.run_dir  # empty once it cannot be written to
        self._file: JsonLines | None = None
        self._num_steps = self._num_spoken = self._num_summed = 0
        self._newest: dict[int, RankReport] = {}
        self._next_s = 0.0  # that a step under way has to last for another line
        self._spent_s = 0.0  # of rank 0, in all steps
        self._spoken_s = now()
        self._last: set[int] = set()
        folder = settings.launcher_dir  # with a summary of a run before that was not said yet
        if folder and not (Path(folder) / SUMMARY).exists():
            self._leave(_TOO_FEW)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have sent their last report."""
        return len(self._last) == self._world_size

    def take(self, rank: int, report: RankReport) -> None:
        """Take in a rank's report."""
        self._hosts[rank], self._devices[rank] = report.host, report.device
        self._merger.add(rank, report.records)
        if report.clues is not None:
            self._diagnoser.add_host(rank, report.clues)
        self._newest[rank] = report
        if report.is_last:
            self._last.add(rank)

    def work(self) -> None:
        """Go through what is complete; write a line if it is time, and there is something new.

        The launcher is left a summary, at most a tenth of the run old.
        """
        for row in self._merger.take():
            self._rows.append(row)
            self._num_steps = row[0].step + 1
            self._spent_s += sum(row[0].spent_us) / 1e6
            self._diagnoser.add(
                row[0].step,
                [record.spent_us for record in row],
                [record.clues for record in row],
                num_steps=row[0].num_steps,
            )
            self._unwritten.append(row)
            if sum(sum(one[0].spent_us) for one in self._unwritten) >= _LEAST_US:
                self._write_steps()
        if self._settings.launcher_dir and self._num_steps > 1.1 * self._num_summed:
            self._num_summed = self._num_steps
            self._leave(self._summary())
        every_s = self._settings.every_s
        is_new = self._num_steps > self._num_spoken
        if is_new and every_s and (late_s := self._now() - self._spoken_s) >= every_s:
            self._spoken_s += late_s - late_s % every_s  # one that is late puts off no other
            self._speak()
        self._look_for_a_long_step()

    def end(self, kind: str, sites: Sequence[CallSite], *, own_s: float) -> None:
        """Say what was seen in all, and close.

        Args:
            kind: how gradients are exchanged; empty where no model was made.
            sites: where the script made its model and its loader.
            own_s: seconds that watching took of this rank.
        """
        if not self._rows:
            text = _TOO_FEW if kind else _DEEPSPEED if "deepspeed" in sys.modules else _NO_MODEL
        else:
            self._write_steps()
            diagnosis = self._diagnoser.diagnose(whole_run=True)
            self._write(diagnosis)
            self._write(RunEnded(self._num_steps))
            share = 100 * own_s / max(self._spent_s, own_s)
            took = f"watching took {share:.2g} % of rank 0's time"
            advice = self._advice(kind, sites)
            notes = [*advice, took, *kept_change(advice, Path.cwd())]
            text = summary(diagnosis, self._hosts, notes, long=self._long())
        self._stream.write(text)
        self._stream.flush()
        self._leave("")
        if self._file is not None:
            self._file.close()

    def _speak(self) -> None:
        """Write a line."""
        self._num_spoken = self._num_steps
        diagnosis = self._diagnoser.diagnose()
        self._write(diagnosis)
        lasts = f", {diagnosis.step_s:.3g} s a step" if diagnosis.num_steps else ""
        said = f"step {diagnosis.step}{lasts}: {sentence(diagnosis, self._hosts)}"
        print(f"evenstep watch: {said}", file=self._stream, flush=True)

    def _look_for_a_long_step(self) -> None:
        """Say who keeps the others waiting in a step while it lasts: soon, and rarely then.

        The launcher has it too, should the step never end.
        """
        if len(self._newest) < self._world_size:
            return
        newest = [self._newest[rank] for rank in range(self._world_size)]
        found = under_way(newest, usual_s(self._rows), self._who)
        if found is None:
            self._next_s = 0.0
        elif found[0] >= self._next_s:
            self._next_s = 2 * found[0]
            self._leave(self._summary(found[1]))
            if self._settings.every_s:
                print(f"evenstep watch: {found[1]}", file=self._stream, flush=True)

    def _summary(self, *notes: str) -> str:
        """Return what was seen so far, for the launcher."""
        diagnosis = self._diagnoser.diagnose(whole_run=True)
        return summary(diagnosis, self._hosts, notes, long=self._long())

    def _long(self) -> list[str]:
        return long_steps(self._rows, self._who)

    @property
    def _who(self) -> list[str]:
        return [who(rank, self._hosts) for rank in range(self._world_size)]

    def _advice(self, kind: str, sites: Sequence[CallSite]) -> Sequence[str]:
        """Return what more is said; the summary is there without it too."""
        try:
            return advice_notes(kind, sites, self._rows)
        except Exception as error:
            return (f"no advice ({type(error).__name__}: {error})",)

    def _leave(self, text: str) -> None:
        """Leave a summary for the launcher, where one waits on this machine; no text: none."""
        if folder := self._settings.launcher_dir:
            with suppress(OSError):  # another machine, or a full disk: it is said at the end too
                if text:
                    (Path(folder) / SUMMARY).write_text(text, "utf-8")
                else:
                    (Path(folder) / SUMMARY).unlink(missing_ok=True)

    def _write_steps(self) -> None:
        rows, self._unwritten = self._unwritten, []
        if not rows or not self._run_dir:
            return
        sums = [joined(records) for records in zip(*rows, strict=True)]
        spent_us = [[record.spent_us for record in row] for row in rows]
        account = accounted([row[0].step for row in rows], spent_us)
        self._write(_measured(sums, self._wall_s))
        self._write(replace(account, num_steps=sums[0].num_steps))
        self._wall_s = sum(sums[0].spent_us) / 1e6 / sums[0].num_steps

    def _write(self, event: Event) -> None:
        """Write an event; where that fails, say so and write no more. The watch continues."""
        if not (folder := self._run_dir):
            return
        try:
            if self._file is None:
                self._file = JsonLines(Path(folder) / "events.jsonl")
                self._file(self._started())
            self._file(event)
        except OSError as error:
            self._run_dir = ""
            text = f"evenstep watch: no more events are written to {folder} ({error})"
            print(text, file=self._stream, flush=True)

    def _started(self) -> RunStarted:
        return RunStarted(
            world_size=self._world_size,
            global_batch_size=sum(record.num_samples for record in self._rows[-1])
            // self._rows[-1][0].num_steps,
            num_steps=0,
            policy="watched",
            hosts=tuple(self._hosts),
            devices=tuple(self._devices),
            versions=versions_here(),
        )


def _measured(sums: Sequence[StepRecord], wall_s: float | None) -> StepMeasured:
    """Return the means of some steps, by their sums; ``wall_s`` is of a step before them."""
    num_steps = sums[0].num_steps
    spent_s = np.array([one.spent_us for one in sums]) / 1e6 / num_steps
    num_samples = np.array([one.num_samples for one in sums]) / num_steps
    compute_s = np.maximum(spent_s[:, Phase.FORWARD] + spent_s[:, Phase.BACKWARD], 1e-6)
    slowest_s = float(compute_s.max())
    idle_s = slowest_s - compute_s
    return StepMeasured(
        step=sums[0].step,
        plan_epoch=0,
        batch_size=tuple(np.rint(num_samples).astype(int).tolist()),
        compute_s=tuple(compute_s.tolist()),
        data_s=tuple(spent_s[:, Phase.INPUT].tolist()),
        idle_s=tuple(idle_s.tolist()),
        makespan_s=slowest_s,
        idle_share=float(idle_s.mean() / slowest_s),
        equal_split_s=None,
        best_split_s=None,
        wall_s=wall_s,
        num_steps=num_steps,
    )


_LEAST_EVERY_S, _MOST_EVERY_S = 1.0, 10.0  # between two reports
_MOST_UNSENT = 8192  # records that the thread that sends has not taken yet
_MOST_RECORDS = 64  # in one key, and a second; shorter steps are summed
_BEHIND_S = 0.25  # rank 0 is behind the others, so that it has what they have just sent
_LAST_S = 1.0  # for which rank 0 waits at its end for the others' last reports


@final
class RecordSender:
    """Reports this rank's steps to rank 0; on rank 0, passes those of all ranks to the leader.

    It reports with each line, and at least every ten seconds: to wake up costs more than ten steps'
    records do. A fault of the watch's own stops it with one line, and the training continues.

    Args:
        store: like a ``torch.distributed.Store``, with a prefix of this watch's own.
        rank: this process's.
        world_size: number of ranks.
        settings: of the watch.

    Attributes:
        rank: likewise.
        every_s: seconds between two reports.
        leader: makes something of the reports; on rank 0.
        records: of this rank's steps that are over; the oldest first.
        is_on: whether it still watches.
        captures: whether this thread captures a CUDA graph: a mark of then shows no time.
        on_stop: called when it stops.
        inline_s: seconds that watching took of the thread that trains, so far.
        thread_s: CPU seconds of its own thread, so far.
    """

    def __init__(self, store: Any, rank: int, world_size: int, settings: WatchSettings) -> None:
        line_s = settings.every_s or _MOST_EVERY_S
        self.every_s = max(line_s / math.ceil(line_s / _MOST_EVERY_S), _LEAST_EVERY_S)
        self.rank = rank
        self.is_on = True
        self.captures: Callable[[], bool] = bool
        self.on_stop: Callable[[], None] = lambda: None
        self.inline_s = self.thread_s = 0.0
        self.leader = None if rank else WatchLeader(world_size, settings)
        self._mail, self._world_size = RankMail(store), world_size
        self._host = self._device = ""
        self.records: deque[StepRecord] = deque(maxlen=_MOST_UNSENT)
        self._catch_up: Callable[[], None] = lambda: None
        self._look: Callable[[int], HostClues] | None = None
        self._phase: Callable[[], Phase] = lambda: Phase.REST
        self._step, self._begun_s = 0, monotonic()  # the one under way, as far as is known
        self._left: list[StepRecord] = []  # short steps whose group is not complete
        self._group_size = 1
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes sent so far; none on rank 0, which sends none."""
        return self._mail.num_bytes

    def open(
        self,
        device: str,
        look: Callable[[int], HostClues],
        *,
        catch_up: Callable[[], None] = lambda: None,
        prepare: Callable[[], None] = lambda: None,
        phase: Callable[[], Phase] = lambda: Phase.REST,
    ) -> None:
        """Begin to report.

        Args:
            device: of this rank, in words.
            look: returns what this process went through, by the step under way.
            catch_up: called before each report: makes records of steps that are over.
            prepare: called first in the thread.
            phase: returns what this rank is in.
        """
        self._catch_up, self._phase, self._look = catch_up, phase, look
        self._host, self._device = socket.gethostname(), device
        self._thread = threading.Thread(
            target=self._run, args=(prepare,), name="evenstep-watch", daemon=True
        )
        self._thread.start()

    def guard(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call for the thread that trains, so that no fault reaches it."""
        if self.is_on and not self.captures():
            begin = perf_counter()
            try:
                call(*arguments)
            except Exception as error:
                self.switch_off(error)
            self.inline_s += perf_counter() - begin

    def switch_off(self, error: BaseException) -> None:
        """Watch no more, say so in a line, and let the training continue."""
        if self.is_on:
            self.stop()
            say_off(self.rank, error)

    def stop(self) -> None:
        """Watch no more."""
        if self.is_on:
            self.is_on = False
            self._over.set()
            with suppress(Exception):
                self.on_stop()

    def close(self, kind: str, sites: Sequence[CallSite]) -> None:
        """Send the last report, on rank 0 say what was seen, and stop.

        Args:
            kind: how gradients are exchanged.
            sites: where the script made its model and its loader.
        """
        if self.is_on:
            try:
                self._over.set()
                self._end(kind, sites)
            except Exception as error:
                self.switch_off(error)
            self.stop()

    def _end(self, kind: str, sites: Sequence[CallSite]) -> None:
        if self._thread is not None:
            self._thread.join(2.0)
            if self._thread.is_alive():
                return
            # Rank 0, which may have the store, may have left before.
            with suppress(Exception) if self.leader is None else nullcontext():
                self._report(is_last=True)
        if self.leader is None:
            return
        until = monotonic() + (_LAST_S if self._thread is not None else 0.0)
        while not self.leader.is_complete and monotonic() < until:
            threading.Event().wait(0.01)
            self._listen()
        self.leader.end(kind, sites, own_s=self.inline_s + self.thread_s)

    def _run(self, prepare: Callable[[], None]) -> None:
        """Report what is there, again and again; the thread's own life."""
        try:
            prepare()
            due_s = monotonic() + (_BEHIND_S if self.leader is not None else 0.0)
            while True:
                due_s = max(due_s + self.every_s, monotonic())
                if self._over.wait(due_s - monotonic()):
                    break
                self._report()
                self.thread_s = thread_time()
        except Exception as error:
            self.switch_off(error)

    def _report(self, *, is_last: bool = False) -> None:
        self._catch_up()
        new = [self.records.popleft() for _ in range(len(self.records))]
        while len(new) > _MOST_RECORDS * self.every_s * self._group_size:
            self._group_size *= 2
        done, self._left = grouped([*self._left, *new], self._group_size)
        if new:
            self._step, self._begun_s = new[-1].step + 1, monotonic()
        while len(done) > _MOST_RECORDS:
            self._hand_over(done[:_MOST_RECORDS])
            done = done[_MOST_RECORDS:]
        clues = None if self._look is None else self._look(self._step)
        self._hand_over(done, clues, is_last=is_last)
        self._listen()

    def _hand_over(
        self,
        records: Sequence[StepRecord],
        clues: HostClues | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        report = RankReport(
            tuple(records),
            clues,
            self._host,
            self._device,
            is_last,
            step=self._step,
            phase=self._phase(),
            lasted_s=monotonic() - self._begun_s,
        )
        if self.leader is None:
            self._mail.send(self.rank, report)
        else:
            self.leader.take(self.rank, report)

    def _listen(self) -> None:
        if self.leader is not None:
            for rank in range(1, self._world_size):
                for report in self._mail.read(rank):
                    self.leader.take(rank, report)
            self.leader.work()


def say_off(rank: int | None, error: BaseException) -> None:
    """Say that a fault has switched a watch off."""
    where = "" if rank is None else f" on rank {rank}"
    with suppress(Exception):
        print(
            f"evenstep watch: off{where}, training goes on ({type(error).__name__}: {error})\n",
            end="",  # one write, as other ranks say so at the same moment
            file=sys.stderr,
            flush=True,
        )
