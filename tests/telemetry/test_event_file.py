"""Files of events, whole or growing: what is good in them is used, or an error says why not."""

import json
import os
import re
import threading
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import events
from evenstep._telemetry import EventFile, EventLines, FollowedFile, JsonLines
from evenstep.events import Rebalanced, RunStarted, WaitingDiagnosed

from .steps import measured

STARTED = RunStarted(2, 64, 100, "Auto()", ("a", "b"), ("cpu", "cpu"))
REBALANCED = Rebalanced(step=3, plan_epoch=1, batch_size=(40, 24), reason="rank 1 is slow")
DIAGNOSED = WaitingDiagnosed(9, 9, 0.2, 0.1, 0.9, ("input",), (1,), (0.1,), ("why",), ("what",))
RUN = [STARTED, REBALANCED, *(measured(step, wall_s=0.3) for step in range(4)), DIAGNOSED]


@pytest.fixture
def file(tmp_path):
    sink = JsonLines(tmp_path / "events.jsonl")
    for event in RUN:
        sink(event)
    sink.close()
    return tmp_path / "events.jsonl"


def record(event, **changes):
    return {**events.to_record(event), **changes}


def insert(file, *lines, at=5):
    """Put ``lines`` of bytes or records before a line of the file, counted from 1."""
    told = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    before = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*before[: at - 1], *told, *before[at - 1 :], b""]))


STEP = measured(9)
DAMAGED = {
    "bytes of no text": (b"\xff\xfe{", "no text in UTF-8"),
    "zeros, as after a power cut": (b"\0" * 4096, "no JSON"),
    "half a line": (b'{"event": "StepMeas', "no JSON"),
    "nested deeply": (b'{"event": "RunEnded", "new": ' + b"[" * 100_000, "no JSON"),
    "a number of thousands of digits": (b"1" * 5000, "no event, an object"),
    "another program's": ({"level": "info"}, "no event, an object"),
    "a list": (b"[1]", "no event, an object"),
    "a name that is none": ({"event": ["StepMeasured"]}, "no event, an object"),
    "longer than any": (b'{"event": "' + b"x" * (5 << 20) + b'"}', "longer than 4 MiB"),
    "a field missing": (
        {"event": "StepMeasured", "step": 3},
        "Object missing required field `plan_epoch`",
    ),
    "text for a number": (record(STEP, step="9"), "Expected `int`, got `str` - at `$.step`"),
    "half a step": (record(STEP, step=9.5), "Expected `int`, got `float` - at `$.step`"),
    "a mean of no step": (record(STEP, num_steps=0), "Expected `int` >= 1 - at `$.num_steps`"),
    "true for a number": (record(STEP, step=True), "Expected `int`, got `bool` - at `$.step`"),
    "NaN": (record(STEP, makespan_s=float("nan")), "no JSON"),
    "NaN in a list": (record(STEP, compute_s=[0.1, float("nan")]), "no JSON"),
    "infinite": (record(STEP, idle_s=[float("inf"), 0.1]), "no JSON"),
    "too large for a float": (
        json.dumps(record(STEP, idle_s=[0.5, 0.1])).replace("0.5", "1e999").encode(),
        "Number out of range",
    ),
    "a huge number": (record(STEP, makespan_s=1e300), "- at `$.makespan_s`"),
    "below zero": (record(STEP, data_s=[-0.1, 0.1]), "Expected `float` >= 0.0 - at `$.data_s[0]`"),
    "a huge integer": (record(STEP, batch_size=[2**70, 1]), "- at `$.batch_size[0]`"),
    "a list in a list": (
        record(STEP, compute_s=[[0.1], 0.1]),
        "got `array` - at `$.compute_s[0]`",
    ),
    "no list": (record(STEP, compute_s=0.1), "Expected `array`, got `float`"),
    "half a character": (record(REBALANCED, reason="\ud800"), "no JSON"),
    "other ranks": (record(STEP, compute_s=[0.1] * 3), "must speak of 2 ranks, got 3"),
    "a rank too many": (
        {"event": "MeasurementRejected", "step": 1, "rank": 2, "problem": ""},
        "must name ranks below 2",
    ),
    "causes without ranks": (record(DIAGNOSED, ranks=[]), "as many entries for each cause"),
    "a start of nothing": (record(STARTED, global_batch_size=0), "Expected `int` >= 1"),
    "a start of others": (record(STARTED, world_size=3), "must speak of 3 ranks, got 2"),
    "a version that is none": (
        {"event": "Schema", "version": "1"},
        "`Schema(version=...)` must be an integer",
    ),
}


@pytest.mark.parametrize(("line", "words"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_left_out_and_counted(file, line, words):
    """The rest is used, and the first damage is said with its line."""
    insert(file, line, at=5)
    insert(file, line, at=7)
    found = EventFile(file)

    assert list(found) == RUN
    assert found.num_damaged == 2
    assert found.left_out.startswith("2 damaged lines are left out (line 5: ")
    assert words in found.left_out


def test_what_a_newer_evenstep_adds_is_passed_over(file):
    """Events by their names, and fields; what it added to a field's meaning is another schema."""
    insert(file, {"event": "MoonRisen", "step": 3}, record(STEP, colour="red"))
    found = EventFile(file)

    assert list(found) == [*RUN[:3], STEP, *RUN[3:]]
    assert found.left_out == "1 event is of a kind unknown to this evenstep"


def test_what_an_older_evenstep_left_out_has_its_default(file):
    """A file of last year is read with the fields of this one."""
    old = record(STEP)
    del old["speed_split_s"], old["cost_split_s"], old["num_steps"]
    insert(file, old)

    assert list(EventFile(file))[3] == STEP


def test_a_newer_schema_is_an_error(file):
    """Its fields may have other meanings."""
    insert(file, {"event": "Schema", "version": events.SCHEMA_VERSION + 1})

    with pytest.raises(ValueError, match=r"events\.jsonl, line 5: schema 2, .*Upgrade evenstep"):
        list(EventFile(file))


def test_several_runs_may_follow_each_other(file):
    """Each of as many ranks as it says; steps begin again."""
    alone = RunStarted(1, 8, 10, "Equal()", ("a",), ("cpu",))
    sink = JsonLines(file)
    sink(alone)
    sink(Rebalanced(0, 0, (8,), "equal"))
    sink.close()

    assert list(EventFile(file)) == [*RUN, alone, Rebalanced(0, 0, (8,), "equal")]


@pytest.mark.parametrize("change", [{"idle_s": []}, {"batch_size": [1] * 3}])
def test_without_a_start_all_lists_of_an_event_are_as_long(tmp_path, change):
    """The first event says how many ranks there are."""
    (tmp_path / "events.jsonl").write_text("".join(
        json.dumps(line) + "\n" for line in (record(STEP, **change), record(STEP))
    ))  # fmt: skip

    assert list(EventFile(tmp_path)) == [STEP]


def test_after_a_damaged_start_the_ranks_are_those_of_the_lines(file):
    """Another cluster's steps are not held against the ranks of the run before."""
    insert(file, {"event": "Schema", "version": 1}, b"{", record(Rebalanced(0, 0, (8,), "")), at=99)
    found = EventFile(file)

    assert list(found)[-1] == Rebalanced(0, 0, (8,), "")
    assert found.num_damaged == 1


@pytest.mark.parametrize("end", [b"", b"\r\n", b"\n\n \n"])
def test_how_the_last_line_ends_is_all_the_same(file, end):
    """One without a newline is whole if its object is."""
    file.write_bytes(file.read_bytes().rstrip(b"\n") + end)
    found = EventFile(file)

    assert list(found) == RUN
    assert found.left_out == ""


FOREIGN = {
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 100,
    "packed": b"\x1f\x8b\x08\x00" + b"\xab\x00\n" * 1000,
    "text": b"It was a dark and stormy night.\n" * 3,
    "a table": b"step,worker,seconds\n0,0,1.5\n",
    "one line of everything": b"a" * (9 << 20),
    "another program's": b'{"level": "info"}\n' * 10,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_file_of_something_else_is_an_error(tmp_path, content):
    """Which says what to give instead."""
    (tmp_path / "other").write_bytes(content)

    with pytest.raises(ValueError, match=r"must hold the events of a run, got none \(line 1: .*un"):
        list(EventFile(tmp_path / "other"))


def test_a_huge_file_of_something_else_is_not_read_to_its_end(tmp_path):
    """A thousand lines are enough to tell."""
    (tmp_path / "log").write_bytes(b"x\n" * 2000)
    found = EventFile(tmp_path / "log")

    with pytest.raises(ValueError, match="must hold the events of a run"):
        list(found)
    assert found.num_damaged == 1000


def test_what_is_no_file_is_an_error(tmp_path):
    """A folder without events, one in the place of the file, and what has no end."""
    with pytest.raises(FileNotFoundError):
        list(EventFile(tmp_path))
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        list(EventFile(tmp_path))
    with pytest.raises(ValueError, match="be a file or a pipe, got /dev/zero"):
        list(EventFile("/dev/zero"))


def test_a_pipe_is_read_as_a_file(tmp_path, file):
    """Such as a shell's ``<(zcat events.jsonl.gz)``."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(file.read_bytes(),))
    writer.start()

    assert list(EventFile(tmp_path / "pipe")) == RUN
    writer.join()


@given(data=st.data())
def test_random_damage_gives_events_or_the_error(tmp_path_factory, data):
    """Bytes that are changed, lost, doubled or added anywhere: never another exception."""
    whole = b"".join(json.dumps(record(event)).encode() + b"\n" for event in RUN)
    whole = b'{"event": "Schema", "version": 1}\n' + whole
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(damaged)))
        end = min(len(damaged), at + data.draw(st.sampled_from((0, 1, 1, 2, 40, 2000))))
        new = data.draw(st.one_of(st.binary(max_size=8), st.just(bytes(damaged[at:end]) * 2)))
        damaged[at:end] = new
    path = tmp_path_factory.mktemp("damaged") / "events.jsonl"
    path.write_bytes(damaged)

    found, error = [], ""
    try:
        found = list(EventFile(path))
    except ValueError as refused:
        error = str(refused)

    assert all(isinstance(event, events.Event) for event in found)
    assert not error or re.search(r"must hold the events of a run|Upgrade evenstep", error)


PLAIN = {
    "int": st.integers(0, 1),
    "float": st.floats(0, 1e6),
    "str": st.text(max_size=9),
    "bool": st.booleans(),
}


OF_ITS_OWN = {  # what cannot be 0, and as many ranks as lists have entries
    "num_steps": st.integers(1, 2),
    "world_size": st.just(2),
    "global_batch_size": st.integers(1, 2),
}


@given(data=st.data(), kind=st.sampled_from(get_args(events.Event)))
def test_every_event_comes_back_as_it_was(data, kind):
    """Of every kind, with every field, through JSON."""
    values = {}
    for name, hint in get_type_hints(kind).items():
        plain = PLAIN[re.search(r"int|float|str|bool", str(hint))[0]]
        value = st.tuples(plain, plain) if "tuple" in str(hint) else plain
        value = st.none() | value if "None" in str(hint) else value
        values[name] = data.draw(OF_ITS_OWN.get(name, value))
    event = kind(**values)

    assert EventLines("events.jsonl").read(json.dumps(record(event)).encode()) == event


def test_a_start_that_an_older_evenstep_wrote_is_read():
    """Without the versions, which were added later; so of every field that has a default."""
    older = record(STARTED)
    del older["versions"]

    assert EventLines("events.jsonl").read(json.dumps(older).encode()) == STARTED


LONGEST = 4 << 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def append(path, content):
    with path.open("ab") as file:
        file.write(content)


def rest(file):
    """All that can be read now."""
    lines = []
    while more := file.read():
        lines += more
    return lines


def test_a_line_is_read_when_it_is_whole(path):
    """In pieces of any length, and once."""
    file, seen = FollowedFile(path), []
    for piece in (b"on", b"e\ntw", b"", b"o\nthree\n", b"\n"):
        append(path, piece)
        seen.append(rest(file))

    assert seen == [[], [b"one"], [], [b"two", b"three"], [b""]]


def test_another_process_goes_on_from_a_position(path):
    """Also from the middle of a line, which is passed over then; from its end, none is."""
    append(path, b"one\ntwo\nthree\n")
    first = FollowedFile(path)
    rest(first)
    append(path, b"four\n")
    found = []
    for position in (first.position, 4, 5, 0):
        second = FollowedFile(path)
        second.begin_at(position)
        found.append(rest(second))

    whole = [b"one", b"two", b"three", b"four"]
    assert found == [whole[3:], whole[1:], whole[2:], whole]


@pytest.mark.parametrize("grown", [False, True])
def test_a_file_that_is_replaced_is_begun_anew(path, tmp_path, grown):
    """Whether the new one is shorter or longer by now."""
    append(path, b"one\ntwo\n")
    file = FollowedFile(path)
    rest(file)
    (tmp_path / "new").write_bytes(b"other\n" * (9 if grown else 1))
    os.replace(tmp_path / "new", path)

    assert rest(file) == [b"other"] * (9 if grown else 1)
    assert file.num_replaced == 1


@pytest.mark.parametrize("grown", [False, True])
def test_a_file_that_is_written_anew_in_place_is_begun_anew(path, grown):
    """Nothing but its content tells."""
    append(path, b"one\ntwo\n")
    file = FollowedFile(path)
    rest(file)
    path.write_bytes(b"other\n" * (9 if grown else 1))

    assert rest(file) == [b"other"] * (9 if grown else 1)


def test_a_file_that_is_shorter_than_where_to_begin_is_read_anew(path):
    """It was replaced between two processes."""
    append(path, b"one\n")
    file = FollowedFile(path)
    file.begin_at(50)

    assert rest(file) == [b"one"]


def test_a_cut_line_that_is_taken_off_is_not_glued_to_the_next(path):
    """As a run that is resumed does with what a killed one left."""
    append(path, b'one\n{"event": "Step')
    file = FollowedFile(path)
    assert rest(file) == [b"one"]
    with path.open("rb+") as written:
        written.truncate(4)
    append(path, b"two\n")

    assert rest(file) == [b"two"]
    assert file.num_replaced == 0


def test_a_line_without_an_end_is_told_once_and_not_kept(path):
    """A gigabyte of it takes no memory; what follows it is read."""
    file, seen = FollowedFile(path), []
    append(path, b"one\n")
    for _ in range(3):
        append(path, b"x" * LONGEST)
        seen += rest(file)
    append(path, b"\ntwo\n")

    assert seen + rest(file) == [b"one", None, b"two"]


def test_a_file_that_is_not_there_may_come(path):
    """And go, and come again."""
    file = FollowedFile(path)
    for content in (b"one\n", b"two\n"):
        with pytest.raises(FileNotFoundError):
            file.read()
        path.write_bytes(content)
        assert rest(file) == [content[:-1]]
        path.unlink()


@given(pieces=st.lists(st.binary(max_size=20) | st.sampled_from([b"\n", b"ab\n", b"\ncd\n"])))
def test_in_any_pieces_it_is_the_whole_file(tmp_path_factory, pieces):
    """Lines that were split in two are one."""
    path = tmp_path_factory.mktemp("followed") / "events.jsonl"
    path.touch()
    file, seen = FollowedFile(path), []
    for piece in pieces:
        append(path, piece)
        seen += rest(file)

    assert seen == path.read_bytes().split(b"\n")[:-1]
