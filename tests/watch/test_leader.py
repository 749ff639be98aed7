"""Rank 0's part of a watch: what ranks tell, in lines, events and what advice is given on."""

import io
import json
import re
import sys
import threading
import types

import numpy as np
import pytest
import torch

from evenstep._diagnosis import Phase, StepClues
from evenstep._report import read_figures
from evenstep._telemetry import EventFile
from evenstep._top import LiveRun
from evenstep.advice import read_run
from evenstep.watch import _courier
from evenstep.watch._courier import RecordSender, WatchLeader
from evenstep.watch._start_watch import WatchSettings
from evenstep.watch._step_records import RankReport, StepRecord
from evenstep.watch._watch import Watch, ignore_captures
from evenstep.watch._watched_run import CallSite

TOO_FEW = "evenstep watch: too few steps were seen. An optimizer's `step()` ends one.\n"


def record(step, compute_us, waited_us, num_steps=1):
    """A step of a rank, with four samples; or several together."""
    spent_us = [0] * len(Phase)
    spent_us[Phase.FORWARD] = num_steps * compute_us
    spent_us[Phase.REDUCTION] = num_steps * waited_us
    clues = StepClues(size=40 * num_steps)
    return StepRecord(step, num_steps, tuple(spent_us), clues, 4 * num_steps)


class Run:
    """Two ranks, of which the second computes three times as long."""

    def __init__(self, settings):
        self.now_s, self.stream = 0.0, io.StringIO()
        self.leader = WatchLeader(2, settings, now=lambda: self.now_s, stream=self.stream)

    def tell(self, steps, *, is_last=False, times=((50_000, 100_000), (150_000, 0))):
        for rank, (compute_us, waited_us) in enumerate(times):
            told = tuple(record(step, compute_us, waited_us, steps.step) for step in steps)
            host = ("ann", "bob")[rank]
            self.leader.take(rank, RankReport(told, None, host, "cpu", is_last))
        self.leader.work()


@pytest.fixture(autouse=True)
def seen(monkeypatch):
    """What advice was given on."""
    found = []
    notes = lambda *given: found.append(given) or ["change this line"]  # noqa: E731
    monkeypatch.setattr(_courier, "advice_notes", notes)
    return found


@pytest.fixture
def run(tmp_path):
    return Run(WatchSettings(5.0, str(tmp_path / "run"), str(tmp_path)))


def test_a_line_every_few_seconds_names_the_rank(tmp_path):
    """Not before its time; and the launcher is left a summary meanwhile."""
    run = Run(WatchSettings(5.0, "", str(tmp_path)))
    run.tell(range(60))
    assert run.stream.getvalue() == ""

    run.now_s = 6.0
    run.tell(range(60, 120))

    assert run.stream.getvalue() == (
        "evenstep watch: step 119, 0.15 s a step: 33 % of the time is waiting, for rank 1 (bob), "
        "because of compute.\n"
    )
    assert "for rank 1 (bob)" in (tmp_path / "summary.txt").read_text("utf-8")


def test_lines_keep_their_time(tmp_path):
    """One that is late does not put off the next; the summary is a tenth of the run old at most."""
    run = Run(WatchSettings(5.0, "", str(tmp_path)))
    seen = []
    for run.now_s, steps in [
        (5.9, range(100)),
        (10.1, range(100, 105)),
        (14.9, range(105, 200)),
        (15.0, range(200, 205)),
    ]:
        run.tell(steps)
        (number,) = re.findall(r"(\d+) steps, ", (tmp_path / "summary.txt").read_text("utf-8"))
        seen.append((len(run.stream.getvalue().splitlines()), int(number)))

    assert seen == [(1, 97), (2, 97), (2, 197), (3, 197)]  # all but the first three count


def test_a_line_is_on_new_steps(run, tmp_path):
    """Where none is complete any more, as in a long test at the end, nothing is said again."""
    run.tell(range(60))
    for run.now_s in (6.0, 60.0, 61.0):
        run.leader.work()
    lines = run.stream.getvalue().splitlines()
    run.tell(range(60, 70))
    run.leader.end("DDP", [], own_s=0.0)

    assert len(lines) == 1
    assert run.stream.getvalue().count(" s a step: ") == 2
    events = (tmp_path / "run" / "events.jsonl").read_text("utf-8")
    assert events.count('"WaitingDiagnosed"') == 3  # one at the end


def test_the_launcher_has_a_summary_without_lines_too(tmp_path):
    """From the begin on, so that it has one to say wherever rank 0 is killed."""
    run = Run(WatchSettings(0.0, "", str(tmp_path)))
    first = (tmp_path / "summary.txt").read_text("utf-8")
    run.tell(range(60))

    assert first == TOO_FEW
    assert "for rank 1 (bob)" in (tmp_path / "summary.txt").read_text("utf-8")
    assert run.stream.getvalue() == ""


def test_a_restart_begins_a_summary_of_its_own(tmp_path):
    """Once that of the attempt before was said; one that was not stays until there is another."""
    settings = WatchSettings(0.0, "", str(tmp_path))
    run = Run(settings)
    run.tell(range(60))
    run.leader.end("DDP", [], own_s=0.0)
    assert not (tmp_path / "summary.txt").exists()

    again = Run(settings)
    assert "too few steps" in (tmp_path / "summary.txt").read_text("utf-8")

    again.tell(range(60))
    Run(settings)
    assert "for rank 1 (bob)" in (tmp_path / "summary.txt").read_text("utf-8")


def test_the_end_says_all_and_hands_over_what_was_seen(run, seen):
    """The summary has the notes, and these are made of the steps of all ranks."""
    site = CallSite("DataLoader", "train.py", 3, "")
    run.tell(range(80), is_last=True)
    run.leader.end("DDP", [site], own_s=0.0012)

    assert run.leader.is_complete
    first, *others = run.stream.getvalue().splitlines()
    assert "33 % of the time is waiting, for rank 1 (bob), because of compute." in first
    assert others[-2:] == [
        "evenstep watch: change this line",
        "evenstep watch: watching took 0.01 % of rank 0's time",
    ]
    ((kind, sites, rows),) = seen
    assert (kind, sites) == ("DDP", [site])
    assert list(rows) == [
        (record(step, 50_000, 100_000), record(step, 150_000, 0)) for step in range(80)
    ]


@pytest.mark.parametrize("num_steps", [1, 2, 16])
def test_short_steps_that_are_told_together_are_diagnosed(num_steps):
    """As single ones are: who is slow, how many steps, how long each is."""
    run = Run(WatchSettings())
    run.tell(range(num_steps - 1, 800, num_steps), is_last=True)
    run.leader.end("DDP", [], own_s=0.0)

    settling = 3 * num_steps
    assert run.stream.getvalue().splitlines()[0] == (
        f"evenstep watch: {800 - settling} steps, 0.15 s each: 33 % of the time is waiting, "
        "for rank 1 (bob), because of compute."
    )


def test_steps_that_come_together_from_some_time_on_stay_known():
    """As where one telling was late; and steps of which nothing is known have no time."""
    run = Run(WatchSettings())
    run.tell(range(100))
    run.tell(range(101, 400, 2), is_last=True)
    run.leader.end("DDP", [], own_s=0.0)
    alone = Run(WatchSettings())
    alone.tell(range(1))
    alone.leader.end("DDP", [], own_s=0.0)

    assert run.stream.getvalue().startswith("evenstep watch: 397 steps, 0.15 s each: 33 % ")
    first, *_ = alone.stream.getvalue().splitlines()
    assert first == "evenstep watch: no two steps of all ranks are known yet."


def test_a_fault_in_what_is_advised_leaves_the_summary(run, monkeypatch):
    """It is told in its place."""
    monkeypatch.setattr(_courier, "advice_notes", lambda *given: 1 / 0)
    run.tell(range(80))
    run.leader.end("DDP", [], own_s=0.0)

    lines = run.stream.getvalue().splitlines()
    assert "because of compute." in lines[0]
    assert "evenstep watch: no advice (ZeroDivisionError: division by zero)" in lines


def test_events_are_those_of_a_run(run, tmp_path):
    """In the order in which a balanced run has them; what a step took is told with the next."""
    run.tell(range(3))
    run.leader.end("DDP", [], own_s=0.0)

    lines = (tmp_path / "run" / "events.jsonl").read_text("utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["Schema", "RunStarted"]
    assert kinds[2:8] == ["StepMeasured", "StepsAccounted"] * 3
    assert kinds[8:] == ["WaitingDiagnosed", "RunEnded"]
    assert events[1]["global_batch_size"] == 8
    assert events[2]["compute_s"] == [0.05, 0.15]
    assert [events[at]["wall_s"] for at in (2, 4, 6)] == [None, 0.15, 0.15]


def test_short_steps_that_are_told_together_count_as_many(run, tmp_path):
    """A thousand of 10 ms, 5 ms of it computing: ten in an event, for every reader."""
    run.tell(range(1000), times=[(2_000, 8_000), (5_000, 5_000)])
    run.leader.end("DDP", [], own_s=0.0)
    folder = tmp_path / "run"
    figures, live, times = read_figures(folder), LiveRun(), read_run(folder)
    for event in EventFile(folder):
        live.add(event)

    assert (figures.num_steps, figures.first_step, figures.last_step) == (1000, 0, 999)
    assert figures.steps.elapsed_s == pytest.approx(9.95)  # of the newest, computing is known
    assert figures.steps.rank_samples.tolist() == [4000, 4000]
    assert figures.steps.num_slowest.tolist() == [0, 1000]
    np.testing.assert_allclose(figures.steps.makespan_s, 0.005)  # in every stretch
    np.testing.assert_allclose(figures.steps.wall_s[:-5], 0.01)
    assert (live.num_measured, live.first_step) == (1000, 0)
    assert live.step_s == pytest.approx(0.01)
    assert times.num_steps == 990  # the first event warms up
    assert times.overhead_s == pytest.approx(0.005)


def test_events_of_more_steps_weigh_more(run, tmp_path):
    """A hundred steps of 10 ms and ten of 100 ms are 18 ms each in the mean."""
    run.tell(range(100), times=[(2_000, 8_000), (5_000, 5_000)])
    run.tell(range(100, 111), times=[(60_000, 40_000), (50_000, 50_000)])
    run.leader.end("DDP", [], own_s=0.0)
    live = LiveRun()
    for event in EventFile(tmp_path / "run"):
        live.add(event)

    assert live.step_s == pytest.approx((100 * 0.01 + 10 * 0.1) / 110)
    computing_s = {one.rank: one.compute_s for one in live.ranks()}
    assert computing_s[0] == pytest.approx((100 * 0.002 + 11 * 0.06) / 111)
    lost_s = {one.rank: one.lost_s for one in live.ranks()}
    assert lost_s[1] == pytest.approx(100 * 0.003 / 111)


def test_a_file_that_cannot_be_written_leaves_the_watch(tmp_path):
    """A line says so, once; then lines and the summary come as without events."""
    (tmp_path / "a file").touch()
    deleted = tmp_path / "deleted" / "events.jsonl"
    for folder, found in ((tmp_path / "a file" / "run", "Not a directory"), (deleted.parent, "")):
        run = Run(WatchSettings(5.0, str(folder)))
        run.tell(range(60))
        deleted.unlink(missing_ok=True)  # of the second, whose disk might be full as well
        run.now_s = 6.0
        run.tell(range(60, 120), is_last=True)
        run.leader.end("DDP", [], own_s=0.0)

        told, *lines = run.stream.getvalue().splitlines()
        assert told.startswith(f"evenstep watch: no more events are written to {folder} (")
        assert found in told
        assert lines[0].startswith("evenstep watch: step 119, ")
        assert lines[1].startswith("evenstep watch: 117 steps, ")
        assert "no more events" not in "".join(lines)


def test_too_few_steps_are_told():
    """A run that ended before any step was whole has no diagnosis."""
    run = Run(WatchSettings())
    run.leader.end("DDP", [], own_s=0.0)

    assert run.stream.getvalue() == TOO_FEW


def test_a_group_without_a_model_is_told():
    """As of a library that exchanges gradients itself; only rank 0 says so."""
    run = Run(WatchSettings())
    for rank in (1, 0):
        courier = RecordSender(Gone(), rank, 2, WatchSettings())
        courier.leader = None if rank else run.leader
        Watch(courier, loaders=[]).close()

    assert run.stream.getvalue() == (
        "evenstep watch: no DDP or FSDP model was made: nothing was watched.\n"
    )


def test_a_rank_that_ends_after_rank_0_is_quiet(capfd):
    """Rank 0 may have had the store: the last that is told reaches it no more."""
    watch = Watch(RecordSender(Gone(), 1, 2, WatchSettings()), loaders=[])
    watch.model_made("DDP", "DistributedDataParallel", torch.device("cpu"), [])
    watch.close()

    assert capfd.readouterr().err == ""


def test_nothing_is_heard_while_a_graph_is_captured():
    """A mark would be in the graph, and tell no time."""
    watch = Watch(RecordSender(Gone(), 1, 2, WatchSettings()), loaders=[])
    watch.model_made("DDP", "DistributedDataParallel", torch.device("cpu"), [])
    log = watch.log
    numbers = []
    for watch.courier.captures in (lambda: True, lambda: False):
        log.guard(log.enter, Phase.CHECKPOINT)
        log.guard(log.leave)
        numbers.append(len(log.noted))
    watch.close()

    assert numbers == [1, 3]  # the first is where the log begins


@pytest.mark.gpu
def test_a_thread_may_ask_for_events_while_a_graph_is_captured():
    """As the watch's does: what another thread captures is whole."""
    event, asked = torch.cuda.Event(enable_timing=True), []
    event.record()

    def ask():
        ignore_captures()
        asked.append(event.query())

    graph, values = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        values += 1
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    graph.replay()

    assert asked == [True]
    assert values.tolist() == [2.0] * 4


class Gone:
    """A store of a process that has ended."""

    def set(self, key, value):
        raise ConnectionError("Broken pipe")


def test_a_step_that_lasts_is_said_while_it_lasts(tmp_path):
    """Once, and again when it has lasted twice as long; the launcher has it if it never ends."""
    run = Run(WatchSettings(5.0, "", str(tmp_path)))
    run.tell(range(60))
    for lasted_s in (5.0, 10.0, 15.0, 19.0, 20.0):
        for rank, phase in enumerate((Phase.REDUCTION, Phase.INPUT)):
            host = ("ann", "bob")[rank]
            run.leader.take(
                rank, RankReport((), host=host, step=60, phase=phase, lasted_s=lasted_s)
            )
        run.leader.work()
    lines = run.stream.getvalue().splitlines()

    assert [line[:45] for line in lines] == [
        "evenstep watch: step 60 has lasted 10 s, and ",
        "evenstep watch: step 60 has lasted 20 s, and ",
    ]
    assert "rank 1 (bob) is waiting for input, and others wait" in lines[0]
    assert "step 60 has lasted 20 s" in (tmp_path / "summary.txt").read_text("utf-8")


def test_steps_of_a_few_milliseconds_are_mostly_exchange(tmp_path):
    """Healthy ones: no cause, and nothing to mend."""
    run = Run(WatchSettings(0.0, "", ""))
    run.tell(range(200), times=((2_000, 1_500), (2_000, 1_500)))
    run.leader.end("DDP", (), own_s=0.0)
    said = run.stream.getvalue()

    assert "as in most steps of 3.5 ms: an exchange takes some milliseconds by itself." in said
    assert "because of" not in said


def test_deepspeed_is_named_where_it_trains(monkeypatch):
    """Its engine is neither DDP nor FSDP."""
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    run = Run(WatchSettings(0.0, "", ""))
    run.leader.end("", (), own_s=0.0)

    assert "DeepSpeed's engine is not watched" in run.stream.getvalue()
