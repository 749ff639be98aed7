"""A file is followed while it grows, shrinks and is replaced, whatever is in it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._telemetry import FollowedFile

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
