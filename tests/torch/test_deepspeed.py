"""DeepSpeed's engine, as it stands: exact in every stage of ZeRO, and balanced."""

import pytest

from evenstep.testing import run_workers

from .deepspeed_runs import PER_SAMPLE_S, STAGES, every_stage

pytestmark = pytest.mark.cluster
pytest.importorskip("deepspeed", reason="needs deepspeed")


@pytest.fixture(scope="module")
def ranks():
    """What became of each stage, by rank."""
    return run_workers(2, every_stage, timeout_s=300)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_it_ends_where_one_process_ends(ranks, stage, parts):
    """In single precision, with sizes that change at every step; accumulated by the engine."""
    error, num_sizes = ranks[0]["exact"][stage, parts]

    assert error <= 1e-6
    assert num_sizes == 2


@pytest.mark.parametrize("stage", STAGES)
def test_waits_are_no_computing(ranks, stage):
    """A rank that waits for one a tenth as fast, in each layer, gets nearly all samples."""
    rates, (fast, slow) = ranks[0]["clocks"][stage]

    assert 0.8 * PER_SAMPLE_S[0] <= rates[0] < 3 * PER_SAMPLE_S[0]
    assert 0.8 * PER_SAMPLE_S[1] <= rates[1] < 3 * PER_SAMPLE_S[1]  # beside what the engine takes
    assert fast + slow == 40
    assert fast >= 30


def test_micro_batches_are_refused(ranks):
    """Every backward of an engine reduces: ranks with other numbers of them would wait for ever."""
    assert "be trained in a loop over whole batches" in ranks[0]["refused"]
