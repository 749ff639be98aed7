"""The page stands alone, can be read without its pictures, and trusts no text of a run."""

import base64
import json
import re
from html.parser import HTMLParser
from itertools import chain

import numpy as np
import pytest

from evenstep._report import page, read_figures
from evenstep.events import (
    ClaimsSwitched,
    ExchangeMeasured,
    LinksMeasured,
    MeasurementRejected,
    MemoryCapped,
    Rebalanced,
    SharesPlanned,
    WaitingDiagnosed,
)

from .recorded import measured, started, trained, written

EVIL = "</script><script>alert('1')</script><img src=x onerror=alert(2)>&amp;"
VOID = {"meta", "input", "line", "br"}


class Outline(HTMLParser):
    """What a page holds: its tags with their attributes, its text by tag, and what is open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open, self.wrong = [], {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


def shown(*runs):
    """The page of runs, each given as a folder."""
    return page([read_figures(run) for run in runs], version="1.2.3", made="today")


def charts_of(text):
    """The figures that the script reads."""
    return json.loads(re.search(r'id="chart-data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture
def full(tmp_path):
    """A run in which all kinds of things happened, with names from a foe."""
    none = {name: () for name in ("causes", "ranks", "lost_share", "evidence", "remedy")}
    lists = {"causes": (EVIL,), "ranks": (1,), "lost_share": (0.1,)}
    lists |= {"evidence": (EVIL,), "remedy": (EVIL,)}
    events = [
        *trained(30, 3, hosts=(EVIL,) * 3, devices=(EVIL,) * 3, policy=EVIL),
        Rebalanced(4, 1, (8, 8, 8), EVIL),
        MeasurementRejected(5, 0, EVIL),
        MemoryCapped(5, 0, 3, 2**30),
        MemoryCapped(5, 1, 4096, 3 * 2**30, "size"),
        ClaimsSwitched(6, True),
        WaitingDiagnosed(9, 10, 0.1, 0.2, 0.9, **lists),
        WaitingDiagnosed(19, 10, 0.1, 0.2, 0.9, **none, no_verdict=EVIL),
        LinksMeasured(3, (1e6,) * 3, (1e6,) * 3),
        SharesPlanned(4, 1, (2**20, 0, 0), 0.1, None, EVIL),
        ExchangeMeasured(5, 1, 0.2, 0.1),
    ]
    return written(tmp_path / "full", events)


def test_no_text_of_a_run_becomes_part_of_the_page(full):
    """Hosts, reasons and problems are shown as they were written, and never run."""
    text = shown(full)
    outline = Outline(text)

    assert not outline.wrong
    assert not outline.open
    assert len(outline.all("script")) == 2
    assert outline.all("img") == []
    assert "<script>alert" not in text
    assert "<" not in re.search(r'id="chart-data">(.*?)</script>', text, re.DOTALL)[1]
    assert any(EVIL in cell for cell in outline.texts["td"])
    assert charts_of(text)["a-waiting"]["rows"] == [EVIL] * 3


def test_it_asks_the_network_for_nothing(full):
    """No address is loaded, and the page forbids itself to."""
    text = shown(full)
    outline = Outline(text)

    assert [attrs for _, attrs in outline.tags if "src" in attrs] == []
    assert all(attrs["href"].startswith("#") for attrs in outline.all("a"))
    assert outline.all("link") == []
    assert "url(" not in text.partition("</style>")[0]
    policies = [attrs.get("content", "") for attrs in outline.all("meta")]
    assert any("default-src 'none'" in policy for policy in policies)


def test_what_it_draws_with_has_its_licence_in_it(full):
    """As the MIT licence asks of every copy."""
    text = shown(full)

    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert "Permission is hereby granted" in text


def test_a_screen_reader_finds_landmarks_headings_and_tables(full):
    """Every chart has a name and a table, every table a caption, every link a target."""
    outline = Outline(shown(full))
    ids = {attrs["id"] for _, attrs in outline.tags if "id" in attrs}
    plots = [attrs for attrs in outline.all("div") if "data-chart" in attrs]

    assert outline.all("html")[0]["lang"] == "en"
    assert [len(outline.all(tag)) for tag in ("header", "main", "footer", "h1")] == [1, 1, 1, 1]
    assert all(attrs["href"][1:] in ids for attrs in outline.all("a"))
    assert len(plots) == 6
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in plots)
    assert len(outline.all("figure")) == len(plots) == len(outline.all("output"))
    assert outline.texts["summary"].count("Figures of this chart as a table") == len(plots)
    assert len(outline.all("caption")) == len(outline.all("table"))
    assert all(attrs["aria-labelledby"] in ids for attrs in outline.all("section"))


def test_every_section_says_what_the_run_tells(full):
    """Savings, causes, plans, links, faults and settings, in words."""
    words = " ".join(chain.from_iterable(Outline(shown(full)).texts.values()))

    for told in (
        "against the equal split",
        "Ranks wait for each other",
        "Causes of waiting",
        "Changes of the batch sizes",
        "Plans of shares",
        "sent an invalid measurement, and the plan stays",
        "fits at most 3 samples.",
        "fits at most a size of 4096 in one forward, as `Cost(max_size=...)` counts it.",
        "From now on, workers begin with a part of their batch",
        "Samples of a step",
        "evenstep 1.2.3",
        "torch 2.0",
    ):
        assert told in words, told


def test_charts_hold_all_ranks_and_tables_say_what_they_leave_out(tmp_path):
    """Of 40 ranks the map has all rows, and the table the 32 that matter."""
    rng = np.random.default_rng(0)
    steps = [measured(step, [8] * 40, rng.gamma(4, 0.1, 40).tolist()) for step in range(5)]
    text = shown(written(tmp_path, [started(40), *steps]))
    chart = charts_of(text)["a-waiting"]
    cells = np.frombuffer(base64.b64decode(chart["values"]), "<u2").reshape(40, 5)
    idle = np.array([np.array(step.idle_s) / step.makespan_s for step in steps]).T

    assert len(chart["rows"]) == 40
    assert cells / 65534 * chart["high"] / 100 == pytest.approx(idle, abs=1e-4)
    assert "The 32 of 40 ranks that the others waited for longest" in text


def test_many_ranks_make_the_time_coarser_and_leave_none_out(tmp_path):
    """A thousand ranks: wider columns, all rows."""
    steps = [measured(step, [8] * 1000, [0.1 + step % 2] * 1000) for step in range(300)]
    charts = charts_of(shown(written(tmp_path, [started(1000), *steps])))

    assert len(charts["a-sizes"]["rows"]) == 1000
    assert charts["a-sizes"]["width"] == 3
    assert len(charts["a-sizes"]["x"]) == 100


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_run_of_a_step_or_two_has_a_page(tmp_path, num_steps):
    """Without a start, accounts, fits or plans."""
    steps = [measured(step, [8, 8], [0.1, 0.2]) for step in range(num_steps)]
    text = shown(written(tmp_path, steps))

    assert "is not known" in text
    assert "has no end in this file" in text
    assert not Outline(text).wrong


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_rank_that_was_lost_before_it_was_accounted_for_has_a_row(tmp_path, num_steps):
    """Of a first start, with more ranks, that ended at once; all else is told of the others."""
    lost = [measured(step, [8, 8, 8], [0.1, 0.2, 0.3]) for step in range(num_steps)]
    run = written(tmp_path / "run", [started(3), *lost, *trained(9, 2)])
    figures = read_figures(run)

    assert figures.world_size == 3
    for table in (figures.steps.batch_size, figures.steps.idle_share, figures.steps.samples_per_s):
        assert table.shape == (9, 3)
        assert np.isnan(table[1:, 2]).all()
    assert figures.accounts.waiting_share.shape == (9, 3)
    assert len(figures.steps.rank_samples) == len(figures.accounts.rank_part_s) == 3
    assert "rank 2" in shown(run)


def test_two_runs_are_compared_in_words(tmp_path):
    """Which is faster by how much, and what was set otherwise; waiting has one scale."""
    before = [measured(step, [8, 8], [0.1, 0.4], wall_s=0.4) for step in range(5)]
    after = [measured(step, [12, 4], [0.2, 0.2], wall_s=0.2) for step in range(5)]
    first = written(tmp_path / "before", [started(2, policy="Equal()"), *before])
    second = written(tmp_path / "after", [started(2), *after])
    text = shown(first, second)
    charts = charts_of(text)

    assert "nothing: it was kept" in text
    assert "A step of after is 50 % shorter: 200 ms against 400 ms." in text
    assert "Policy: Auto() against Equal()." in text
    assert charts["a-waiting"]["high"] == charts["b-waiting"]["high"] == pytest.approx(75)
    labels = [one["label"] for one in charts["both-step-time"]["series"]]
    assert labels == ["before", "after"]
    assert not Outline(text).wrong


def test_what_was_saved_before_an_equal_start_is_told(tmp_path):
    """A run for comparison in the same folder; the split was equal only if it was in all starts."""
    steps = [
        measured(step, [8, 8], [0.2, 0.2], equal_split_s=0.3, wall_s=0.2) for step in range(50)
    ]
    equal = [started(2, policy="Equal()"), *steps[:2]]
    both = shown(written(tmp_path / "both", [started(2), *steps, *equal]))
    twice = shown(written(tmp_path / "twice", [started(2), *equal, *equal]))

    assert "Balancing saved 5.2 s against the equal split" in both
    assert "Training began 2 times in this file. Figures are of all starts together" in both
    assert "The split was equal, so nothing was saved." in twice


def test_the_shorter_of_two_runs_is_drawn_by_means(tmp_path):
    """Over stretches as wide as those of the longer run, with all of its own in them."""

    def run(name, num_steps):
        walls = [0.8 if step % 4 == 1 else 0.1 for step in range(num_steps)]
        steps = [measured(at, [8, 8], [0.1, 0.1], wall_s=walls[at]) for at in range(num_steps)]
        return written(tmp_path / name, [started(2), *steps])

    chart = charts_of(shown(run("long", 2100), run("short", 600)))["both-step-time"]
    long, short = (one["values"] for one in chart["series"])
    known = [value for value in short if value is not None]

    assert chart["width"] == 8
    assert len(known) == 600 / 8
    assert known[:-1] == pytest.approx([0.275] * 74)
    assert known[:-1] == pytest.approx(long[:74])


def test_two_runs_of_one_name_are_told_apart(tmp_path):
    """In sentences too; a cause that no rank has in particular is named without one."""
    lists = {"causes": ("network",), "ranks": (-1,), "lost_share": (0.1,)}
    lists |= {"evidence": ("it",), "remedy": ("",)}
    found = WaitingDiagnosed(4, 10, 0.1, 0.2, 0.9, **lists)
    steps = [measured(step, [8, 8], [0.4, 0.4], wall_s=0.4) for step in range(5)]
    shorter = [measured(step, [8, 8], [0.2, 0.2], wall_s=0.2) for step in range(5)]
    first = written(tmp_path / "a" / "run", [started(2), *steps])
    second = written(tmp_path / "b" / "run", [started(2), *shorter, found])
    text = shown(first, second)

    assert "A step of run (B) is 50 % shorter" in text
    assert "Costliest cause: network against none." in text
