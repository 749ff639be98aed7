"""What a record has to hold so that ``Replay`` can repeat it."""

import json

import pytest

from evenstep import Cluster
from evenstep.events import (
    BalancingStopped,
    ClaimsSwitched,
    EstimatesRestored,
    MeasurementRejected,
    Rebalanced,
    RunStarted,
    StepMeasured,
    StepsAccounted,
    to_record,
)
from evenstep.policies import Replay

from .simulated import measured as timed

PAIR = Cluster(2, 8)


def started(world_size=2, total=8):
    return RunStarted(world_size, total, 5, "Auto()", ("a",) * world_size, ("cpu",) * world_size)


def measured(step, sizes):
    return StepMeasured(step, 0, sizes, (0.1, 0.2), (0, 0), (0, 0), 0.2, 0.2, None, None, None)


def changed(step, epoch, sizes):
    return Rebalanced(step, epoch, sizes, "why")


PLAIN = [
    started(),
    measured(0, (4, 4)),
    StepsAccounted(0, 1, *[(0.0, 0.0)] * 10),
    changed(1, 1, (5, 3)),
    measured(1, (5, 3)),
    measured(2, (2, 1)),  # the short last step
    changed(3, 2, (2, 6)),
    changed(3, 3, (6, 2)),  # in force before the one before it ever was
    measured(3, (6, 2)),
]


def run(folder, given, *, end="\n"):
    """Write events, or lines as they stand, and return their file."""
    file = folder / "events.jsonl"
    lines = [each if isinstance(each, str) else json.dumps(to_record(each)) for each in given]
    file.write_text("\n".join(['{"event": "Schema", "version": 1}', *lines]) + end)
    return file


def sizes_of(policy, num_steps):
    """The sizes that a policy decides, whatever its steps take."""
    decision, sizes = policy.init(PAIR), []
    for _ in range(num_steps):
        sizes.append(tuple(decision.batch_size.tolist()))
        decision = policy.update(PAIR, timed(sizes[-1], [0.1, 0.9]), decision.state)
    return sizes, decision.reason


def test_sizes_are_those_of_the_record_step_by_step(tmp_path):
    """By the file or the folder; past the end the last ones stay, and the reason says so."""
    for path in (run(tmp_path, PLAIN), tmp_path, str(tmp_path)):
        sizes, reason = sizes_of(Replay(path), 5)

        assert sizes == [(4, 4), (5, 3), (5, 3), (6, 2), (6, 2)]
        assert "the record ends before" in reason


def test_only_the_newest_run_of_a_file_counts(tmp_path):
    """From its own first step on, and a line that was cut short is left out."""
    newest = [started(), EstimatesRestored((True, True), "resumed", (3, 5)), measured(7, (3, 5))]
    policy = Replay(run(tmp_path, [*PLAIN, *newest], end='\n{"event": "Rebal'))

    assert sizes_of(policy, 2)[0] == [(3, 5), (3, 5)]
    assert policy.record.first_step == 7


def test_steps_without_a_measurement_count(tmp_path):
    """The first step may have been rejected: the sizes are those of the steps after it."""
    told = [started(), MeasurementRejected(0, 1, "late"), measured(1, (4, 4))]

    assert Replay(run(tmp_path, told)).record.first_step == 0


def test_a_record_ends_where_balancing_stopped(tmp_path):
    """No event has the equal sizes of after, which are one plan later."""
    told = [*PLAIN, BalancingStopped(3, 0, "broke", ""), measured(4, (4, 4))]
    record = Replay(run(tmp_path, told)).record

    assert record.last_step == 3
    assert record.plans[-1].batch_size == (6, 2)


REFUSED = {
    "no step": ([started()], "hold a step that was measured"),
    "a missing plan": ([*PLAIN, changed(4, 5, (4, 4))], "hold every plan, got plan 5 after plan 3"),
    "claims": ([*PLAIN, ClaimsSwitched(3, True)], "stayed with their rank, got claims from step 3"),
    "by cost": ([*PLAIN, measured(4, (5, 3))], r"got \[5, 3\] in step 4, planned \[6, 2\]"),
    "other workers": ([*PLAIN, changed(4, 4, (4, 2, 2))], "give 2 sizes that add up to 8"),
    "another batch": ([*PLAIN, changed(4, 4, (4, 5))], "give 2 sizes that add up to 8"),
    "parts of samples": ([*PLAIN, changed(4, 4, (4.5, 3.5))], "give 2 sizes that add up to 8"),
    "a missing field": ([*PLAIN, '{"event": "Rebalanced"}'], "intact record, got KeyError"),
    "no sizes": ([*PLAIN, changed(4, 4, None)], "intact record, got TypeError"),
    "no JSON": ([*PLAIN, "{"], "intact record, got Expecting .* in line 11 of"),
    "no events": (["[1]"], "be the events of a run, got line 2 of"),
    "the future": (['{"event": "Schema", "version": 99}'], "schema up to 1, got schema 99"),
}


@pytest.mark.parametrize(("told", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_repeated_exactly_is_refused(tmp_path, told, words):
    """With what is in the way, and where."""
    with pytest.raises(ValueError, match=words):
        Replay(run(tmp_path, told))


def test_a_cluster_of_others_is_refused(tmp_path):
    """By the number of workers, and by the global batch."""
    policy = Replay(run(tmp_path, PLAIN))
    for cluster in (Cluster(3, 8), Cluster(2, 16)):
        with pytest.raises(ValueError, match=r"`Replay\(run=...\)` must be of"):
            policy.init(cluster)


def test_sizes_are_cut_to_bounds_that_are_tighter(tmp_path):
    """In a simulation: training repeats them as they were."""
    policy = Replay(run(tmp_path, PLAIN))
    decision = policy.update(Cluster(2, 8, max_batch_size=4), timed((4, 4), [0.1, 0.1]), 0)

    assert decision.batch_size.tolist() == [4, 4]
    assert "cut to the bounds" in decision.reason


def test_a_file_that_is_not_there_is_named(tmp_path):
    """As the system says it."""
    with pytest.raises(FileNotFoundError, match=r"events\.jsonl"):
        Replay(tmp_path)
