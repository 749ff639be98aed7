"""What holds for every test: no deadline on a busy machine, accelerators only where there are."""

from __future__ import annotations

import gc
import multiprocessing
import os

import hypothesis
import pytest

from evenstep.testing._workers import PRELOADED

# One fork server serves the whole test run, and whoever comes first starts it: a pool of the
# simulator's would leave every later worker to import torch by itself, half the time of the suite.
multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))

FAST = "not slow"  # the marks of `make test`
NUM_EXAMPLES, NUM_FAST_EXAMPLES = 40, 12


def pytest_configure(config):
    """Set how many cases a property is tried on: few in `make test`, more in `make test-slow`.

    `benchmarks/fuzz.py` asks for many more cases than a test run has time for.
    """
    few = config.option.markexpr == FAST
    number = os.environ.get("EVENSTEP_EXAMPLES", NUM_FAST_EXAMPLES if few else NUM_EXAMPLES)
    # A shared machine stalls for longer than any per-example deadline; pytest-timeout ends a hang.
    hypothesis.settings.register_profile("evenstep", deadline=None, max_examples=int(number))
    hypothesis.settings.load_profile("evenstep")


def pytest_report_header(config):
    """Say what a verb of make leaves out, so that an empty run explains itself."""
    if config.option.markexpr == FAST:
        return (
            f"slow tests are left out, and properties are tried on {NUM_FAST_EXAMPLES} cases: "
            "`make test-slow` runs the others, with the same ARGS"
        )
    return None


@pytest.fixture(scope="module", autouse=True)
def earlier_files_are_no_garbage():
    """Leave what earlier files imported, and keep, out of later searches for garbage.

    Each of those took a second at the end of a long run, and tests of loaders make one each.
    """
    gc.collect()  # what is garbage by now is to be found, with what it left open
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage while tests are collected: that took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    """Leave what was imported and collected out of later searches for garbage.

    Each would go through all of it, for half a second wherever a test runs out of memory.
    """
    gc.collect()  # what is garbage by now is to be found, with what it left open
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Begin with what starts processes; leave out ``gpu`` where torch sees no accelerator.

    Files are handed out one by one to those who share the tests: with the long ones first, nobody
    ends up with one of them while the others have nothing left to do.
    """
    long = {item.path for item in items if item.get_closest_marker("cluster")}
    items.sort(key=lambda item: item.path not in long)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no accelerator here"))
