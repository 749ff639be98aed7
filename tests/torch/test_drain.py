"""SIGTERM on any rank: all of them save the same step, leave, and go on from there."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Drain

from .._tiers import slow_but
from .restarts import bereft, drained, drained_by_four


@pytest.mark.cluster
@pytest.mark.parametrize("told", slow_but([1], [0, 1]))
def test_all_ranks_stop_after_the_same_step(tmp_path, told):
    """Whoever was told: the step after the one in which it was, and no collective for it.

    So it is where a policy is shown each step.
    """
    results = run_workers(2, drained, str(tmp_path), told, 5)
    assert results == [(list(range(7)), None)] * 2

    resumed = run_workers(2, drained, str(tmp_path), told, 7)
    assert resumed == [([7, 8], 7)] * 2


@pytest.mark.cluster
def test_short_steps_stop_a_moment_later(tmp_path):
    """Where a plan holds for several steps: after the same step all the same."""
    results = run_workers(2, drained, str(tmp_path), 1, 30, "auto")

    assert results[0] == results[1]
    assert 31 < len(results[0][0]) <= 31 + 33


@pytest.mark.cluster
@pytest.mark.slow
def test_a_notice_reaches_every_tensor_parallel_rank_in_the_same_step():
    """Also those whose own data-parallel group was told nothing."""
    found = run_workers(4, drained_by_four)

    assert all(steps == found[0] for steps in found)
    assert [step for step, requested in found[0] if requested] == list(range(3, 8))


def test_one_process_stops_too(tmp_path):
    """Without a process group as well; and what heard the signal before hears it again."""
    before = signal.getsignal(signal.SIGTERM)

    assert drained(0, str(tmp_path), 0, 3) == ([0, 1, 2, 3, 4], None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_before_the_first_step_a_signal_does_what_it_did(heard):
    """There is nothing to save, and nobody to agree with yet."""
    with Drain(Balancer(), signals=(signal.SIGUSR1,)) as drain:
        signal.raise_signal(signal.SIGUSR1)

    assert heard == [signal.SIGUSR1]
    assert not drain.requested


def test_a_second_signal_does_what_the_first_would_have_done(heard, tmp_path):
    """A process that hangs can be ended still."""
    stock = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=1)
    # A policy that is shown each step, so that each is due, however short.
    with (
        Balancer(policy="lb-bsp-2020") as balancer,
        Drain(balancer, signals=(signal.SIGUSR1,)) as drain,
    ):
        model, loader = balancer.prepare(nn.Linear(4, 4), stock)
        for step, (x,) in enumerate(loader):
            if step in (2, 5):
                signal.raise_signal(signal.SIGUSR1)
            assert heard == ([] if step < 5 else [signal.SIGUSR1])
            assert drain.requested == (step > 2)
            model(x).mean().backward()


@pytest.fixture
def heard():
    """What heard SIGUSR1 before anybody else."""
    numbers = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.cluster
def test_with_a_worker_lost_there_is_nothing_to_wait_for(tmp_path):
    """Told to end, and stuck where nothing can be heard: it ends within a heartbeat or two."""
    results = run_workers(2, bereft, str(tmp_path), timeout_s=20, check=False, stop_after=2)

    assert "died without a word" in str(results[0])
    assert "was asked to end as well" in (tmp_path / "0.log").read_text()


@pytest.mark.parametrize("signals", [(), (signal.SIGKILL,), (signal.SIGTERM, signal.SIGSTOP)])
def test_signals_that_cannot_be_caught_are_refused(signals):
    """At once."""
    with pytest.raises(ValueError, match=r"Drain\(signals=...\)` must name at least one signal"):
        Drain(Balancer(), signals=signals)


def test_a_thread_is_told_where_signals_are_heard():
    """Python's own message speaks of an interpreter."""
    problems = []

    def enter():
        try:
            Drain(Balancer()).__enter__()
        except RuntimeError as error:
            problems.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    (problem,) = problems
    assert problem.startswith("Python gets signals in the main thread only: enter `Drain` there.")
    assert "ray.train.get_preemption_info()" in problem
