"""The demo fits the machine it runs on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.demo import _measure
from evenstep.demo._training_job import SMALL, TrainingJob
from evenstep.testing import run_workers

SPEEDS = st.lists(st.floats(0.05, 4.0), min_size=2, max_size=8)


def job_of(speeds):
    return TrainingJob(
        size=SMALL,
        global_batch_size=SMALL.batch_size * len(speeds),
        policy="equal",
        device="cpu",
        speeds=tuple(speeds),
        num_steps=None,
        budget_s=60.0,
        seconds_per_sample=None,
        seed=0,
    )


@given(speeds=SPEEDS, real_s=st.floats(1e-5, 0.1))
def test_real_computing_always_fits(speeds, real_s):
    """The fastest worker has time to spare for each sample, and no step is too short to time."""
    job = job_of(speeds)
    per_sample_s = _measure.choose_seconds_per_sample(job, real_s)

    assert per_sample_s / max(speeds) >= 1.5 * real_s
    assert per_sample_s * job.global_batch_size / sum(speeds) >= 0.249


@given(speeds=SPEEDS, per_sample_s=st.floats(1e-4, 0.1))
def test_both_runs_fit_in_the_budget(speeds, per_sample_s):
    """Unless that left too few steps to see anything, the two runs last a minute together."""
    job = job_of(speeds)
    num_steps = _measure.choose_num_steps(job, per_sample_s)
    equal_s = per_sample_s * SMALL.batch_size / min(speeds)
    balanced_s = per_sample_s * job.global_batch_size / sum(speeds)

    assert 20 <= num_steps <= 80
    assert num_steps == 20 or num_steps * (equal_s + balanced_s) <= job.budget_s


def communication(rank):
    return _measure.communication_s(1000, torch.device("cpu"), repetitions=3)


@pytest.mark.slow
@pytest.mark.cluster
def test_all_workers_agree_on_what_communication_costs():
    """One number for the limit, above zero."""
    one, other = run_workers(2, communication)

    assert one == other
    assert one > 0
