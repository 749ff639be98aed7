"""Workers of a test that fail, and those that only seem to do well."""

import logging

import pytest

from evenstep.testing import WorkerFailed, run_workers


def _logs(rank, text):
    logging.getLogger("evenstep").error(text)
    return rank


@pytest.mark.cluster
def test_an_internal_fault_fails_a_worker():
    """Training goes on after it, so that its results may look right."""
    fault = "Step 3: internal fault of evenstep (KeyError: 3)."

    with pytest.raises(WorkerFailed, match=r"Step 3: internal fault .*KeyError"):
        run_workers(1, _logs, fault)
    assert run_workers(1, _logs, fault, allow_faults=True) == [0]
    assert run_workers(1, _logs, "Another error.") == [0]
