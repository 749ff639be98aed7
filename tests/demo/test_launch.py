"""Worker processes that fail are heard, and none is left behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evenstep.demo._launch import DemoFailed, Workers
from evenstep.demo._recording import Follower
from evenstep.demo._training_job import Size, TrainingJob

TINY = Size(width=16, num_layers=1, num_heads=2, context=8, batch_size=4)


def job_of(**changes):
    fields = {
        "size": TINY,
        "global_batch_size": 8,
        "policy": "auto",
        "device": "cpu",
        "speeds": (1.0, 0.5),
        "num_steps": 1000,
        "budget_s": 60.0,
        "seconds_per_sample": 0.01,
        "seed": 0,
    }
    return TrainingJob(**{**fields, **changes})


def processes_of(run_dir):
    """How many processes name ``run_dir`` among their arguments."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:  # it ended in between
            continue
    return sum(str(run_dir).encode() in line for line in lines)


def test_a_job_is_read_as_it_was_written(tmp_path):
    """The worker does what the parent meant."""
    job_of().save(tmp_path)

    assert TrainingJob.load(tmp_path) == job_of()


def work(run_dir, num_workers, look):
    """Run the job in ``run_dir``, calling ``look`` now and then."""
    with Workers(run_dir, num_workers) as workers:
        while workers.running():
            look()
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_failing_worker_ends_the_run_with_its_own_words(tmp_path):
    """The message holds the first error and says where its traceback is."""
    job_of(policy="evenstep.no_such_module:Policy").save(tmp_path)
    with pytest.raises(DemoFailed) as caught:
        work(tmp_path, 2, look=lambda: None)

    assert "failed first" in str(caught.value)
    assert "no_such_module" in str(caught.value)
    assert f"More in {tmp_path / 'failed-rank'}" in str(caught.value)


@pytest.mark.slow
@pytest.mark.cluster
def test_workers_find_a_policy_in_the_folder_that_the_command_line_added(tmp_path, monkeypatch):
    """Also where Python itself is told to leave the current folder out."""
    (tmp_path / "mine.py").write_text("from evenstep.policies import Equal as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    job_of(policy="mine:Mine", num_steps=3).save(tmp_path / "run")
    work(tmp_path / "run", 2, look=lambda: None)

    assert Follower(tmp_path / "run").update().num_done == 3


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_an_interrupt_leaves_no_process_behind(tmp_path):
    """Ctrl-C in the middle of training ends torchrun and every worker."""
    job_of().save(tmp_path)
    follower, seen = Follower(tmp_path), []

    def interrupt_in_training():
        if follower.update().num_done >= 2:
            seen.append(processes_of(tmp_path))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, 2, look=interrupt_in_training)

    assert seen == [3]
    assert processes_of(tmp_path) == 0
