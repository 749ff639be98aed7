"""How long the walk of one plain step is: figures that may only shrink."""

import pytest

from evenstep.testing import run_workers

from .walks import walk

# From the engine's callback to the policy; about 8 would do. A report of rank 0 is made when it is
# sent, and is a message as any other rank's: that is 5 of them.
MOST_CALLS = 15
MOST_FILES = 46  # that a step passes through, all threads together; about 15 would do


@pytest.fixture(scope="module")
def walks():
    """Rank 0's walk alone, and with another rank."""
    return {num_ranks: run_workers(num_ranks, walk)[0] for num_ranks in (1, 2)}


def test_calls_from_the_engine_to_the_policy(walks):
    """On the thread whose report is the last one."""
    calls = walks[1].calls
    print(f"{len(calls)} calls:", *calls, sep="\n  ")

    assert calls[0].endswith("Backward._finished")
    assert len(calls) <= MOST_CALLS


def test_files_that_a_step_passes_through(walks):
    """On the training thread, and on the one that talks to the other rank."""
    files = walks[2].all_files
    print(f"{len(files)} files, {len(walks[2].files)} of them on the training thread")
    print(*sorted(files), sep="\n")

    assert walks[2].files <= files
    assert len(files) <= MOST_FILES
