"""A recording holds what its records say."""

from __future__ import annotations

import json

from evenstep.demo._notes import Notebook, Tail
from evenstep.demo._recording import Follower, Recording

from .recordings import recording, step_record


def test_records_of_unknown_kinds_are_passed_over():
    """A newer evenstep may tell more than this demo draws."""
    run = Recording()
    run.add({"event": "Schema", "version": 1})
    run.add({"event": "SomethingNew", "step": 3})

    assert run.num_done == 0


def test_recent_times_are_those_of_the_sizes_in_force():
    """Just after a change, times of the old sizes are no answer for the new ones."""
    run = recording([(24, 24), (40, 8)], (1.0, 0.2), num_steps=2)

    assert run.recent(run.compute_s) == list(run.compute_s[-1])


def test_time_left_goes_by_the_latest_steps():
    """After a change to faster steps the estimate follows."""
    run = recording([(24, 24)] * 5 + [(40, 8)], (1.0, 0.2), num_steps=10)
    run.num_steps = 20

    assert abs(run.left_s() - 10 * run.wall_s[-1]) < 1e-9


def test_nothing_is_left_unknown_as_zero():
    """Before the first step time nobody can say how long it takes."""
    assert Recording().left_s() is None


def test_a_follower_reads_what_was_added(tmp_path):
    """Both files, each from where it was left."""
    follower = Follower(tmp_path)
    first = follower.update().num_done
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(step_record(0, (2, 2), (1, 1))) + "\n")
    second = follower.update().num_done
    third = follower.update().num_done

    assert (first, second, third) == (0, 1, 1)


def test_a_line_half_written_waits_for_its_end(tmp_path):
    """A reader never sees half a record, and never loses one."""
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    seen = [tail.read()]
    with path.open("w") as file:
        for part in ('{"event": "A"}\n{"ev', 'ent": "B"}', "\n"):
            file.write(part)
            file.flush()
            seen.append(tail.read())

    assert seen == [[], [{"event": "A"}], [], [{"event": "B"}]]


def test_only_one_rank_writes(tmp_path):
    """A notebook without a folder keeps quiet."""
    Notebook(tmp_path).write("Phase", text="training")
    Notebook(None).write("Phase", text="training")

    assert Tail(tmp_path / "notes.jsonl").read() == [{"event": "Phase", "text": "training"}]
