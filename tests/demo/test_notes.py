"""What is written line by line can be read along."""

from __future__ import annotations

from evenstep.demo._notes import Notebook, Tail


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
