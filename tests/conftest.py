"""What holds for every test: no deadline on a busy machine, accelerators only where there are."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing.forkserver
import os
import tempfile
from pathlib import Path

import hypothesis
import pytest

from evenstep.testing._workers import PRELOADED

from ._durations import Durations
from ._tiers import COLLECTED

# What workers of a folder's clusters import beside that, for seconds each: its fork server has it.
PRELOADED_FOR = {"huggingface": ("transformers.trainer",), "lightning": ("lightning.pytorch",)}
MACHINE = pytest.StashKey()
"""An open file whose lock is the machine: shared by tests, or one test's alone."""
FAST = "not slow"  # the marks of `make test`
NUM_EXAMPLES, NUM_FAST_EXAMPLES = 40, 12


def pytest_configure(config):
    """Set how many cases a property is tried on: few in `make test`, more beside slow tests.

    ``EVENSTEP_EXAMPLES=2000`` asks for many more cases than a test run has time for.
    """
    few = config.option.markexpr == FAST
    number = os.environ.get("EVENSTEP_EXAMPLES", NUM_FAST_EXAMPLES if few else NUM_EXAMPLES)
    # A shared machine stalls for longer than any per-example deadline; pytest-timeout ends a hang.
    hypothesis.settings.register_profile("evenstep", deadline=None, max_examples=int(number))
    hypothesis.settings.load_profile("evenstep")
    config.pluginmanager.register(Durations(config.rootpath), "durations")
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    path = Path(tempfile.gettempdir(), f"evenstep-tests-{run}.lock")
    config.stash[MACHINE] = path.open("w")


def pytest_unconfigure(config):
    """Take the lock's file away: those who have it open keep their lock."""
    file = config.stash[MACHINE]
    file.close()
    Path(file.name).unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # so that no test's time limit runs meanwhile
def pytest_runtest_protocol(item):
    """Keep the machine to a test that is marked ``alone``: others share it."""
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    fcntl.flock(item.config.stash[MACHINE], kind)
    try:
        return (yield)
    finally:
        fcntl.flock(item.config.stash[MACHINE], fcntl.LOCK_UN)


def pytest_report_header(config):
    """Say what a verb of make leaves out, so that an empty run explains itself."""
    if config.option.markexpr == FAST:
        return (
            f"slow tests are left out, and properties are tried on {NUM_FAST_EXAMPLES} cases: "
            "`make test TESTS=all` runs the others too, with the same ARGS"
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
    if clustered := [item.path for item in session.items if item.get_closest_marker("cluster")]:
        start_fork_server({path.parent.name for path in clustered})


def start_fork_server(folders):
    """Start the one that serves the whole run, before anything else does.

    A pool of the simulator's would leave every later worker to import torch by itself.
    """
    more = [name for folder in sorted(folders) for name in PRELOADED_FOR.get(folder, ())]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *more])
    multiprocessing.forkserver.ensure_running()


@pytest.hookimpl(tryfirst=True)  # before marks take any away
def pytest_collection_modifyitems(config, items):
    """Begin with what starts processes; leave out ``gpu`` where torch sees no accelerator.

    Files are handed out one by one to those who share the tests: with the long ones first, nobody
    ends up with one of them while the others have nothing left to do. Those that need the machine
    alone come last, when nothing else is left to wait for them.
    """
    fast = [item for item in items if not item.get_closest_marker("slow")]
    config.stash[COLLECTED] = tuple(
        {item.nodeid.partition("[")[0] for item in some} for some in (fast, items)
    )
    long = {item.path for item in items if item.get_closest_marker("cluster")}
    alone = {item.path for item in items if item.get_closest_marker("alone")}
    items.sort(key=lambda item: (item.path in alone, item.path not in long))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no accelerator here"))
