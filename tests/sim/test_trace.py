"""A recorded run is read as it was recorded, or refused by its line."""

import numpy as np
import pytest

from evenstep import sim
from evenstep.policies import Fixed

HEADER = "step,worker,seconds,samples"
ROWS = ["5,0,0.2,10", "5,1,0.3,30", "6,1,0.6,30", "6,0,0.1,10"]


def write(folder, lines, name="trace.csv"):
    file = folder / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_a_run_at_the_recorded_sizes_takes_the_recorded_times(tmp_path):
    """Whatever part of them is a fixed cost."""
    file = write(tmp_path, [HEADER, *ROWS])
    for fixed_s in (0.0, 0.05, np.array([0.02, 0.1])):
        given = sim.read_trace(file, intercept_s=fixed_s)
        report = sim.run(Fixed((10, 30)), given.cluster(40), given.workload)

        assert given.name == "trace"
        assert given.presence is None
        np.testing.assert_allclose(report.compute_s, [[0.2, 0.3], [0.1, 0.6]])


def test_order_of_columns_and_blank_lines_say_nothing(tmp_path):
    """Spaces neither."""
    table = sim.read_trace(write(tmp_path, [HEADER, *ROWS[:2], "", *ROWS[2:]]))
    other = [
        "samples,step,seconds,worker",
        "10,5,0.2,0",
        "30,5, 0.3, 1",
        "30,6,0.6,1",
        "10,6,0.1,0",
    ]
    turned = sim.read_trace(write(tmp_path, other, "turned.csv"))

    assert np.array_equal(table.slope_s, [[0.02, 0.01], [0.01, 0.02]])
    assert np.array_equal(table.slope_s, turned.slope_s)


def test_a_mark_of_byte_order_is_no_part_of_the_first_name(tmp_path):
    """As spreadsheets begin text in UTF-8 with."""
    file = write(tmp_path, [HEADER, *ROWS], "marked.csv")
    plain = sim.read_trace(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())

    assert np.array_equal(sim.read_trace(file).slope_s, plain.slope_s)


def test_who_has_no_row_was_not_there(tmp_path):
    """A worker that joins, and one that vanishes for a step; columns by number, not by place."""
    rows = ["0,7,0.2,10", "1,7,0.2,10", "1,2,0.4,10", "2,2,0.4,10", "3,2,0.4,10", "3,7,0.2,10"]
    given = sim.read_trace(write(tmp_path, [HEADER, *rows]))
    report = sim.run("equal", given.cluster(20), given.workload)

    assert given.presence.astype(int).tolist() == [[0, 1], [1, 1], [1, 0], [1, 1]]
    assert report.batch_size.tolist() == [[0, 20], [10, 10], [20, 0], [10, 10]]
    assert report.restarts == (1, 2, 3)
    np.testing.assert_allclose(report.step_s, [0.4, 0.4, 0.8, 0.4])


@pytest.mark.parametrize(
    ("rows", "line", "match"),
    [
        (["0,0,1,1", "2,0,1,1"], 3, "leave out no step"),
        (["1,0,1,1", "0,0,1,1"], 3, "sorted"),
        (["0,0,1,1", "0,0,1,1"], 3, "worker 0 in step 0, as in line 2"),
        (["0,0,1,1", "0,1,-1,1"], 3, "seconds"),
        (["0,0,0,1"], 2, "seconds"),
        (["0,0,nan,1"], 2, "seconds"),
        (["0,0,inf,1"], 2, "seconds"),
        (["0,0,,1"], 2, "seconds"),
        (["0,0,fast,1"], 2, "seconds"),
        (["0,0,1,0"], 2, "samples"),
        (["0,0,1,1.5"], 2, "samples"),
        (["0,-1,1,1"], 2, "worker"),
        (["0,host,1,1"], 2, "worker"),
        (["x,0,1,1"], 2, "step"),
        (["0,0,1,1", "0,1,1"], 3, "4 values"),
        (["0,0,1,1", "0,1,1,1,1"], 3, "4 values"),
        ([], 1, "one row"),
        (['0,0,1,"1'], 2, "CSV"),
    ],
)
def test_a_bad_line_is_named(tmp_path, rows, line, match):
    """With what is wrong in it."""
    file = write(tmp_path, [HEADER, *rows])

    with pytest.raises(ValueError, match=match) as error:
        sim.read_trace(file)
    assert f"in line {line} of trace.csv" in str(error.value)


@pytest.mark.parametrize(
    "header",
    [
        "step,worker,seconds",
        "step,worker,seconds,samples,host",
        "step,worker,seconds,samples,step",
        "",
    ],
)
def test_other_columns_are_refused(tmp_path, header):
    """Those that are missing, those that nobody knows, and those that stand there twice."""
    with pytest.raises(ValueError, match=r"each once and no others.* in line 1"):
        sim.read_trace(write(tmp_path, [header, *ROWS]))


def test_other_files_are_refused(tmp_path):
    """By their ending, or by what they hold."""
    with pytest.raises(ValueError, match=r"end in \.csv"):
        sim.read_trace(write(tmp_path, [HEADER, *ROWS], "trace.txt"))
    (tmp_path / "trace.csv").write_bytes(b"step,worker\xff")
    with pytest.raises(ValueError, match="UTF-8"):
        sim.read_trace(tmp_path / "trace.csv")
    with pytest.raises(FileNotFoundError):
        sim.read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize("value", [-0.1, np.nan, np.zeros(3)])
def test_fixed_costs_that_cannot_be_are_refused(tmp_path, value):
    """One number, or one per worker, of at least 0."""
    with pytest.raises(ValueError, match="intercept_s"):
        sim.read_trace(write(tmp_path, [HEADER, *ROWS]), intercept_s=value)


def test_a_step_cannot_be_shorter_than_its_fixed_cost(tmp_path):
    """The line that says so is named."""
    with pytest.raises(ValueError, match=r"intercept_s.*in line 5 of trace.csv"):
        sim.read_trace(write(tmp_path, [HEADER, *ROWS]), intercept_s=0.1)
