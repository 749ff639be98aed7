"""A run is read from its file or a stream, from the end where it is long, and followed."""

import io
import itertools
import os
import threading
import time

import pytest

from evenstep._top import FileSource, StreamSource, TopView, watch
from evenstep.events import Rebalanced, RunEnded

from .runs import events, lines, measured, started


def caught_up(source):
    while source.update(within_s=5.0):
        pass
    return source.run


def append(path, content):
    with path.open("ab") as file:
        file.write(content)


def test_what_is_added_is_seen_and_nothing_twice(tmp_path):
    """Line by line, by the run's folder."""
    file = tmp_path / "events.jsonl"
    file.write_bytes(lines(events(3)))
    source = FileSource(tmp_path)
    assert caught_up(source).num_measured == 3
    append(file, lines([measured(3)]))
    append(file, lines([measured(4)])[:-5])

    assert caught_up(source).num_measured == 4
    assert source.remark == ""


def long_file(path, num_steps, *, before=()):
    """A run of more than 8 MiB, made from the text of one step."""
    step = lines([measured(0)]).splitlines()[1]
    first, last = step.split(b'"step": 0')
    steps = [b'%s"step": %d%s\n' % (first, number, last) for number in range(num_steps)]
    path.write_bytes(lines(before) + lines([started()]) + b"".join(steps))
    assert path.stat().st_size > 8 << 20
    return path


def test_a_long_file_is_begun_from_its_end(tmp_path):
    """Its start is read all the same, which says who trains; and it is said."""
    path = long_file(tmp_path / "events.jsonl", 26_000)
    source = FileSource(path)
    run = caught_up(source)

    assert run.start == started()
    assert run.last.step == 25_999
    assert 1000 < run.num_measured < 15_000
    assert source.remark == "only the last 4 MiB were read at first"


def test_the_newest_start_counts_wherever_it_is(tmp_path):
    """Far from the end, or in what is read anyway; the ranks before it were others."""
    path = long_file(tmp_path / "events.jsonl", 26_000, before=events(30, 2))
    assert caught_up(FileSource(path)).start == started()
    append(path, lines(events(30, 2)))
    source = FileSource(path)
    run = caught_up(source)

    assert (run.start, run.num_measured) == (started(2), 30)
    assert source.remark == ""


def test_the_newest_start_counts_however_far_off_it_is(tmp_path):
    """Ranks that are fewer since are no damage, and have the hosts of the newest start."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(lines(events(3, 4)) + lines([started(2)]))
    with path.open("r+b") as file:
        file.seek(257 << 20, os.SEEK_END)  # a hole, which takes no room on a disk
        file.write(b"\n" + b"".join(lines([measured(9, 2)]).splitlines(keepends=True)[1:]))
    source = FileSource(path)
    run = caught_up(source)

    assert run.start == started(2)
    assert run.last is not None
    assert source.remark == "only the last 4 MiB were read at first"


def test_a_file_that_is_replaced_is_another_run(tmp_path):
    """Nothing of the one before is left, not even the number of its ranks."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(lines(events(10)))
    source = FileSource(path)
    caught_up(source)
    (tmp_path / "new").write_bytes(lines([measured(0, 2)]))
    os.replace(tmp_path / "new", path)

    assert (caught_up(source).num_measured, len(source.run.ranks())) == (1, 2)
    assert source.run.start is None
    assert source.remark == ""


def test_damage_is_said_beside_the_run(tmp_path):
    """And the rest is shown."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(lines(events(3)) + b"\0\n" + lines([measured(3)]))
    source = FileSource(path)

    assert caught_up(source).num_measured == 4
    assert source.remark.startswith("1 damaged line is left out (line 10: no JSON)")


def test_a_file_of_something_else_is_refused(tmp_path):
    """Once all that is there is read."""
    (tmp_path / "other").write_bytes(b"once upon a time\n")

    with pytest.raises(ValueError, match="must hold the events of a run"):
        FileSource(tmp_path / "other").update(within_s=5.0)


def test_a_run_that_is_silent_is_known_by_the_age_of_its_file(tmp_path):
    """Until something is added: then its own clock counts."""
    path, now = tmp_path / "events.jsonl", [1000.0]
    path.write_bytes(lines(events(3)))
    os.utime(path, (time.time() - 65,) * 2)
    source = FileSource(path, clock=lambda: now[0])
    assert source.silent_s == 0.0
    caught_up(source)
    now[0] += 5.0
    assert 70 <= source.silent_s < 130
    append(path, lines([measured(3)]))
    caught_up(source)
    now[0] += 5.0

    assert source.silent_s == 5.0


def test_an_empty_file_is_as_silent_as_it_is_old(tmp_path):
    """A run that has not begun."""
    (tmp_path / "events.jsonl").touch()
    source = FileSource(tmp_path)
    caught_up(source)

    assert source.silent_s < 60


def test_reading_stops_when_its_time_is_over(tmp_path):
    """A view is drawn while a long file is caught up with."""
    (tmp_path / "events.jsonl").write_bytes(lines(events(50)))
    ticks = iter(range(1000))
    source = FileSource(tmp_path, clock=lambda: next(ticks))

    assert source.update(within_s=10)
    assert 0 < source.run.num_measured < 20
    assert caught_up(source).num_measured == 50


def test_a_stream_is_read_to_its_end():
    """As over ssh; what was cut short is left out."""
    source = StreamSource(io.BytesIO(lines(events(7)) + b'{"event": "Step'))
    while not source.is_over:
        source.update(within_s=5.0)

    assert source.run.num_measured == 7


def test_a_stream_that_goes_on_is_not_waited_for():
    """What there is can be shown meanwhile."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream, os.fdopen(writer, "wb", buffering=0) as written:
        source = StreamSource(stream)
        assert not source.update(within_s=0.01)
        written.write(lines(events(7)))
        while source.run.num_measured < 7:
            source.update(within_s=0.1)
        assert not source.is_over
        written.close()
        while not source.is_over:
            source.update(within_s=5.0)


def test_the_view_follows_until_its_reader_has_seen_enough(tmp_path):
    """From before the run begins to after its end, and over a moment without the file."""
    from rich.console import Console

    path, screen, seen = tmp_path / "run" / "events.jsonl", io.StringIO(), []
    told = [lines(events(3)), lines([Rebalanced(3, 1, (32,) * 4, "why")]), lines([RunEnded(3)])]

    def wait(_):
        seen.append(screen.getvalue())
        screen.truncate(0)
        if not told:
            return True
        path.parent.mkdir(exist_ok=True)
        append(path, told.pop(0))
        return False

    console = Console(file=screen, force_terminal=True, width=100, height=30)
    threads = set(threading.enumerate())
    view = watch(FileSource(path.parent), console, title="mine", refresh_s=1.0, wait=wait)

    assert isinstance(view, TopView)
    assert "not to be read now: No such file" in seen[0]
    assert "step 2" in seen[1]
    assert "why" in seen[2]
    assert "the run ended after 3 steps" in seen[3]
    assert not set(threading.enumerate()) - threads


def test_however_seldom_it_is_drawn_nothing_piles_up(tmp_path):
    """What is added between two drawings is read by the next, however much more than one look."""
    from rich.console import Console

    path, waited_s = tmp_path / "events.jsonl", []
    path.write_bytes(lines([started()]))

    def wait(seconds):
        at = 50 * len(waited_s)
        waited_s.append(seconds)
        append(path, lines([measured(step) for step in range(at, at + 50)]))
        return len(waited_s) > 5

    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    ticks = itertools.count(step=0.01)
    source = FileSource(path, clock=lambda: next(ticks))  # a look is over after a few lines
    view = watch(source, console, title="mine", refresh_s=60, wait=wait, clock=lambda: 0.0)

    assert view.run.last.step == 249
    assert max(waited_s) <= 1.0
