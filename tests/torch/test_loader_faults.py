"""What goes wrong in loader workers reaches the loop, and nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from .loader_fakes import Failing, Items, alone, loader_threads

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a single core
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch):
    """No loader leaves a thread or a process. Torch looks after its workers more often than 5 s."""
    look = _MultiProcessingDataLoaderIter._try_get_data
    assert look.__defaults__ == (5.0,)
    monkeypatch.setattr(look, "__defaults__", (0.2,))
    yield
    gc.collect()

    assert not loader_threads()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_the_data_set_reaches_the_loop(num_workers):
    """With its type and, from a worker, its traceback."""
    loader = alone(DataLoader(Failing(20), batch_size=4, num_workers=num_workers))

    with pytest.raises(KeyError) as caught:
        list(loader)
    assert "no sample" in str(caught.value)
    if num_workers:
        assert "in DataLoader worker process" in str(caught.value)
        assert "loader_fakes.py" in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loop", [iter, lambda loader: loader.steps()])
def test_a_loop_that_goes_on_after_an_error_does_not_come_to_its_end(loop, num_workers):
    """The rest of the epoch would be missing without a word, on one of the ranks."""
    steps = loop(alone(DataLoader(Failing(20), batch_size=4, num_workers=num_workers)))

    with pytest.raises(KeyError):
        list(steps)
    with pytest.raises(RuntimeError, match=r"ended with KeyError: .*, so it cannot go on"):
        next(steps)
    assert list(steps) == []


class Forgetful(Items):
    def __getitems__(self, indices):
        return [self[index] for index in indices[1:]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_are_missing_are_an_error(num_workers):
    """Weights go by how many were asked for."""
    loader = alone(DataLoader(Forgetful(8), batch_size=4, num_workers=num_workers))

    with pytest.raises(ValueError, match=r"`__getitems__` must return \d samples for as many"):
        list(loader)


class Nameless(Items):
    def __getitem__(self, index):
        class Error(Exception):
            pass

        raise Error("no way to send this")


def test_an_error_that_cannot_be_sent_arrives_as_text():
    """Its class exists in the worker alone."""
    loader = alone(DataLoader(Nameless(8), batch_size=4, num_workers=1))

    with pytest.raises(RuntimeError, match=r"Caught Error .*\n(.*\n)*.*no way to send this"):
        list(loader)


def fail(_):
    raise OSError("not today")


@pytest.mark.parametrize(
    "options", [{"worker_init_fn": fail}, {"collate_fn": fail}], ids=["init", "collate"]
)
def test_an_error_in_the_users_functions_reaches_the_loop(options):
    """Neither `worker_init_fn` nor `collate_fn` fails in silence."""
    loader = alone(DataLoader(Items(20), batch_size=4, num_workers=2, **options))

    with pytest.raises(OSError, match="not today"):
        list(loader)


class Unsendable(Items):
    def __getitem__(self, index):
        return lambda: index


def test_a_sample_that_cannot_be_sent_is_an_error():
    """Torch's loader hangs for ever here."""
    loader = alone(DataLoader(Unsendable(8), batch_size=4, num_workers=1, collate_fn=list))

    with pytest.raises(Exception, match="Can't pickle"):
        list(loader)


class Deadly(Items):
    def __getitem__(self, index):
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_killed_worker_ends_the_loop_with_an_error():
    """No hang, and nothing left behind."""
    loader = alone(DataLoader(Deadly(40), batch_size=4, num_workers=2))

    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (killed by signal|exited)"):
        list(loader)


def fail_at_once(_):
    return 1 / 0


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_is_left_leaves_nothing_behind(persistent):
    """By break, by an error in its body, and with workers that persist until `close`."""
    loader = alone(
        DataLoader(
            Items(400, item_s=0.001), batch_size=4, num_workers=2, persistent_workers=persistent
        )
    )
    for _ in loader:
        break
    with pytest.raises(ZeroDivisionError):
        list(map(fail_at_once, loader))
    gc.collect()
    assert bool(loader_threads()) == persistent

    assert len(next(iter(loader))[0]) == 4
    loader.close()
    loader.close()


def test_a_forgotten_loader_cleans_up():
    """When it is collected, as torch's does."""
    loader = alone(DataLoader(Items(40), batch_size=4, num_workers=1, persistent_workers=True))
    next(iter(loader))
    assert loader_threads()
    del loader


class Stuck(Items):
    def __getitem__(self, index):
        time.sleep(600)


def test_a_batch_that_does_not_come_in_time_is_an_error():
    """`timeout` counts from when the loop asks, and a stuck worker is killed."""
    loader = alone(DataLoader(Stuck(8), batch_size=4, num_workers=1, timeout=0.2))

    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        next(iter(loader))


class Eventful(type(multiprocessing.get_context("fork"))):
    """Where the program starts a process of its own while a loader starts its workers."""

    own = None

    def Process(self, *args, **options):
        if self.own is None:
            self.own = super().Process(target=time.sleep, args=(60,), daemon=True)
            self.own.start()
        return super().Process(*args, **options)


def test_what_else_the_program_started_meanwhile_lives_on():
    """Of all child processes, a stuck loader kills its own workers alone."""
    context = Eventful()
    loader = alone(
        DataLoader(
            Stuck(8), batch_size=4, num_workers=1, timeout=0.2, multiprocessing_context=context
        )
    )
    with pytest.raises(RuntimeError, match="timed out"):
        list(loader)
    assert context.own.is_alive()

    context.own.kill()
    context.own.join()


def test_a_long_step_is_no_timeout():
    """While the loop computes, nothing is overdue."""
    loader = alone(DataLoader(Items(12), batch_size=4, num_workers=1, timeout=0.3))
    for _ in loader:
        time.sleep(0.4)
