"""What of a damaged file is good is used, and the report says what was not."""

import json

import numpy as np
import pytest

from evenstep._report import page, read_figures
from evenstep.events import to_record

from .recorded import PARTS, accounted, measured, started, trained, written

STEP = json.dumps(to_record(measured(7, [8, 8], [0.1, 0.2])))
ACCOUNT = json.dumps(to_record(accounted(7, [[0.1, 0.1]] * len(PARTS), num_steps=0)))


@pytest.fixture
def lines(tmp_path):
    """The lines of a good run of two ranks, seven steps long."""
    folder = written(tmp_path / "good", trained(7, 2))
    return (folder / "events.jsonl").read_bytes().splitlines(keepends=True)


def read(tmp_path, lines):
    """The figures of a file of these lines."""
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"".join(lines))
    return read_figures(file)


DAMAGES = {
    "binary": b"\x00\xff\xfe garbage\n",
    "no JSON": b'{"event": "StepMeasured", "step": \n',
    "a cut line inside": STEP[:200].encode() + b"\n",
    "a number that is none": STEP.replace("0.2", "0.2x", 1).encode() + b"\n",
    "NaN for a time": STEP.replace("0.2", "NaN", 1).encode() + b"\n",
    "a time below zero": STEP.replace("[0.1, 0.2]", "[0.1, -0.2]", 1).encode() + b"\n",
    "a list too long": STEP.replace("[8, 8]", "[8, 8, 8]").encode() + b"\n",
    "no number of a step": STEP.replace('"step": 7', '"step": "x"').encode() + b"\n",
    "a mean of no step": STEP.replace('"num_steps": 1', '"num_steps": 0').encode() + b"\n",
    "a size below zero": STEP.replace("[8, 8]", "[8, -8]").encode() + b"\n",
    "other ranks": json.dumps(to_record(measured(7, [8], [0.1]))).encode() + b"\n",
    "an account of no steps": ACCOUNT.encode() + b"\n",
    "another type": b"[1, 2, 3]\n",
    "nested too deeply": b"[" * 100_000 + b"\n",
    "a long line": b"x" * (5 << 20) + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_line_is_left_out_and_told(tmp_path, lines, damage):
    """All other steps are there, the page is made, and it says how many lines were left out."""
    good = read(tmp_path, lines)
    figures = read(tmp_path, [*lines[:5], damage, *lines[5:]])

    assert figures.num_steps == good.num_steps == 7
    assert figures.steps.makespan_s == pytest.approx(good.steps.makespan_s)
    assert "1 damaged line" in figures.left_out
    assert "line 6" in figures.left_out
    assert "1 damaged line" in page([figures], version="1", made="now")


def test_a_run_that_was_killed_is_told_up_to_its_last_whole_line(tmp_path, lines):
    """Cut anywhere: never an error but the one that there is no step."""
    whole = b"".join(lines)
    for end in range(len(b"".join(lines[:4])), len(whole), 97):
        figures = read(tmp_path, [whole[:end]])

        assert 1 <= figures.num_steps <= 7
        assert page([figures], version="1", made="now")


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"\x1f\x8b" + bytes(range(256)) * 50, b"name,value\n1,2\n" * 2000],
    ids=["empty", "blank", "gzip", "a table"],
)
def test_a_file_of_something_else_is_refused_by_name(tmp_path, content):
    """With what to give instead."""
    with pytest.raises(ValueError, match=r"run\.jsonl") as refused:
        read(tmp_path, [content])
    assert "Runtime(run_dir=...)" in str(refused.value)


def test_a_device_without_an_end_is_refused():
    """At once, and not after it filled the memory."""
    with pytest.raises(ValueError, match="must be a file or a pipe, got /dev/zero"):
        read_figures("/dev/zero")


def test_a_newer_schema_is_refused(tmp_path, lines):
    """Fields may have other meanings there."""
    with pytest.raises(ValueError, match="Upgrade evenstep"):
        read(tmp_path, [b'{"event": "Schema", "version": 99}\n', *lines])


def test_events_of_a_newer_evenstep_are_passed_over_and_told(tmp_path, lines):
    """A new kind, and a new field, change nothing else."""
    new = [b'{"event": "SomethingNew", "x": 1}\n']
    more = [line.replace(b'"step"', b'"new": [1], "step"', 1) for line in lines]

    assert "unknown" in read(tmp_path, lines + new).left_out
    assert read(tmp_path, more).num_steps == 7


def test_memory_does_not_grow_with_the_run(tmp_path):
    """Ten times the steps, the same arrays."""
    sizes = []
    for num_steps in (600, 6000):
        steps = (measured(step, [8, 8], [0.1, 0.2]) for step in range(num_steps))
        figures = read_figures(written(tmp_path / str(num_steps), [started(2), *steps]))
        sizes.append(figures.steps.batch_size.size)
        assert figures.steps.num.sum() == num_steps

    assert max(sizes) <= 2 * 512
    assert np.unique(np.diff(figures.edges)).tolist() == [figures.width]
