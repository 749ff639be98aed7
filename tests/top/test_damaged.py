"""Whatever is in a file of events, it can be shown and planned with, or an error says why not."""

import io
import json
import math

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from evenstep import sim
from evenstep._top import FileSource, TopView
from evenstep.advice import read_run
from evenstep.events import MemoryCapped, RunEnded, SharesPlanned, WorkerLost, to_record

from .runs import DIAGNOSED, events

RUN = [
    *events(6),
    DIAGNOSED,
    SharesPlanned(3, 1, (1, 2, 3, 4), 0.1, None, "why"),
    MemoryCapped(3, 1, 40, 1),
    WorkerLost(5, 1, "node0", "silent"),
    RunEnded(6),
]
NUMBERS = st.sampled_from((0, -1, 1, 2**40, 2**60, 0.0, 1e-310, 1e300, math.nan, math.inf))
PLAIN = st.none() | st.booleans() | NUMBERS | st.text(max_size=5)
VALUES = st.recursive(PLAIN, lambda each: st.lists(each, max_size=4))
REFUSED = ("must hold the events of a run", "Upgrade evenstep", "hold a measured step",
           "measure every worker", "hold a step of", "hold times above")  # fmt: skip


@given(data=st.data())
def test_a_run_with_other_values_is_shown_or_refused(tmp_path_factory, data):
    """Every field may have any value: no reader ends with another error than those it names."""
    records = [json.loads(json.dumps(to_record(event))) for event in RUN]
    for _ in range(data.draw(st.integers(1, 12))):
        record = data.draw(st.sampled_from(records))
        name = data.draw(st.sampled_from(sorted(record)))
        value = record[name]
        if isinstance(value, list) and value and data.draw(st.booleans()):
            value[data.draw(st.integers(0, len(value) - 1))] = data.draw(VALUES)
        else:
            record[name] = data.draw(VALUES)
    path = tmp_path_factory.mktemp("damaged") / "events.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

    for read in (show, read_run, sim.read_trace):
        error = ""
        try:
            read(path)
        except ValueError as refused:
            error = str(refused)
        assert not error or any(words in error for words in REFUSED), error


def show(path):
    source = FileSource(path)
    while source.update(within_s=5.0):
        pass
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(TopView(source.run, str(path), source.remark))
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
