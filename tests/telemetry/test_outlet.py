"""A sink that raises, blocks or is slow costs its own events, never training's time."""

import logging
import sys
import threading

import pytest

from evenstep._telemetry import FaultLog, Outlet, close_all
from evenstep.events import LossNotFinite, MeasurementRejected, PolicyFailed, PolicySlow, RunEnded


@pytest.fixture
def told(caplog):
    """What a person is told, as texts."""
    caplog.set_level(logging.WARNING, logger="evenstep")
    return lambda: [record.getMessage() for record in caplog.records]


def test_events_arrive_in_order_and_all_of_them(told):
    """Those from before the start too, and the sink is finished after the last."""
    heard = []
    outlet = Outlet(heard.append, finish=lambda: heard.append("end"))
    outlet(RunEnded(0))
    outlet.start()
    for number in range(1, 100):
        outlet(RunEnded(number))

    assert outlet.close()
    assert heard == [*map(RunEnded, range(100)), "end"]
    assert told() == []


def test_a_sink_runs_on_a_thread_of_its_own():
    """And that thread is at its end after the close."""
    threads = []
    outlet = Outlet(lambda event: threads.append(threading.current_thread()))
    outlet.start()
    outlet(RunEnded(0))
    outlet.close()

    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


def test_a_sink_that_raises_is_told_of_once_and_gets_no_more(told):
    """The rest of the events are dropped quietly, and the thread ends cleanly."""
    calls = []

    def broken(event):
        calls.append(event)
        raise KeyError("a mistake of the user's")

    outlet = Outlet(broken, name="mine", finish=lambda: calls.append("end"))
    outlet.start()
    for number in range(5):
        outlet(RunEnded(number))

    assert outlet.close()
    assert calls == [RunEnded(0), "end"]
    assert len(told()) == 1
    assert "The telemetry sink mine failed on RunEnded (KeyError" in told()[0]
    assert "training continues" in told()[0]


def test_a_sink_that_wants_to_exit_is_told_of_too(told):
    """It ends its own thread alone, and that without a word."""

    def leaving(event):
        sys.exit("enough")

    outlet = Outlet(leaving, name="mine")
    outlet.start()
    outlet(RunEnded(0))

    assert outlet.close()
    assert "The telemetry sink mine failed on RunEnded (SystemExit: enough)" in told()[0]


def test_a_sink_that_blocks_drops_what_is_too_much_and_says_so_once(told):
    """The giver never waits, nor does the close for longer than it was told to."""
    gate, entered = threading.Event(), threading.Event()

    def blocked(event):
        entered.set()
        gate.wait()

    outlet = Outlet(blocked, name="stuck", capacity=3)
    outlet.start()
    outlet(RunEnded(0))
    assert entered.wait(5)
    for number in range(1, 11):
        outlet(RunEnded(number))
    thread = outlet._thread
    done = outlet.close(within_s=0.05)
    gate.set()
    thread.join(5)

    assert not done
    assert outlet.num_dropped == 7
    assert len(told()) == 2
    assert "stuck is too slow: 3 events wait for it" in told()[0]
    assert "stuck missed 10 events and did not end within 0.05 s" in told()[1]


def test_a_slow_sink_gets_the_rest_at_the_close(told):
    """What was dropped is counted at the end."""
    gate, entered, heard = threading.Event(), threading.Event(), []

    def slow(event):
        entered.set()
        gate.wait(5)
        heard.append(event)

    outlet = Outlet(slow, name="slow", capacity=2)
    outlet.start()
    outlet(RunEnded(0))
    assert entered.wait(5)
    for number in range(1, 6):
        outlet(RunEnded(number))
    gate.set()

    assert outlet.close(within_s=5)
    assert heard == [RunEnded(0), RunEnded(1), RunEnded(2)]
    assert told()[1] == "The telemetry sink slow missed 3 events."


def test_several_are_closed_within_one_limit(told):
    """One that blocks takes no time from those behind it beyond the limit."""
    gate, heard = threading.Event(), []
    stuck, fine = Outlet(lambda event: gate.wait(), name="stuck"), Outlet(heard.append)
    for outlet in (stuck, fine):
        outlet.start()
        outlet(RunEnded(1))
    threads = [stuck._thread, fine._thread]

    close_all([stuck, fine], within_s=0.5)
    gate.set()
    for thread in threads:
        thread.join(5)

    assert heard == [RunEnded(1)]
    assert told() == ["The telemetry sink stuck missed 0 events and did not end within 0.5 s."]


def test_a_fault_is_told_to_a_person_once_for_each_who_has_it(told):
    """A policy that fails at every step is one line, not as many as there are steps."""
    log = FaultLog()
    for step in range(3):
        log(PolicyFailed(step, "ValueError: no", "Mine"))
        log(PolicySlow(step, 2.0, 38.0))
        log(MeasurementRejected(step, 1, "compute_s is nan"))
        log(MeasurementRejected(step, 2, "compute_s is nan"))
        log(LossNotFinite(step, (1, 2)))
        log(RunEnded(step))

    assert [text.partition(" Training")[0] for text in told()] == [
        "Step 0: the policy Mine failed, and the last good plan stays (ValueError: no).",
        "Step 0: the policy took 2.0 s to decide, for the second time in a row, and all "
        "ranks waited. It is called again after 38 s; until then the sizes stay.",
        "Step 0: rank 1 sent an invalid measurement, and the plan stays: compute_s is nan.",
        "Step 0: rank 2 sent an invalid measurement, and the plan stays: compute_s is nan.",
        "From step 0 on losses are NaN or infinite, first on rank 1 and rank 2: check the "
        "batch and the loss there. Averaged gradients spread it to the parameters of all ranks for "
        "good: restart from a checkpoint of an earlier step.",
    ]
