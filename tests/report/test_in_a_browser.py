"""The page in Chromium: it asks for nothing, has no errors, and is read with keys alone."""

import re

import pytest

from evenstep._report import page as page_of
from evenstep._report import read_figures

from .._headless import missing, opened, until, violations
from .recorded import measured, started, trained, written

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A page on two runs: one of few ranks, drawn as lines, and one of many, drawn as maps."""
    folder = tmp_path_factory.mktemp("runs")
    steps = [measured(step, [8] * 40, [0.1 + step % 3] * 40, wall_s=3.2) for step in range(30)]
    runs = (
        written(folder / "few", trained(700, 3)),
        written(folder / "many", [started(40), *steps]),
    )
    file = folder / "report.html"
    text = page_of([read_figures(run) for run in runs], version="1", made="now")
    file.write_text(text, "utf-8")
    return file


@pytest.mark.parametrize(
    "view", [{}, {"dark": True}, {"width": 390, "height": 844}], ids=["light", "dark", "phone"]
)
def test_it_opens_without_a_request_or_a_complaint(path, view):
    """And axe finds nothing serious: contrast, names, order of headings."""
    with opened(path, **view) as (page, seen):
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert (seen.requests, seen.complaints) == ([], [])


def test_every_chart_is_drawn(path):
    """Some pixel of each is of another color than the page."""
    drawn = """[...document.querySelectorAll('[data-chart] canvas')].map(canvas => {
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    })"""
    with opened(path) as (page, _):
        colors = page.evaluate(drawn)

    assert len(colors) == 10
    assert min(colors) > 3


def test_a_chart_is_read_with_keys(path):
    """The slider of a chart has the focus, and the arrow tells another stretch aloud."""
    with opened(path) as (page, _):
        slider = page.locator("#a-step-time-at")
        output = page.locator("output[for=a-step-time-at]")
        slider.focus()
        before = output.text_content()
        page.keyboard.press("ArrowLeft")
        after = output.text_content()
        spoken = slider.get_attribute("aria-valuetext")

    assert before != after == spoken
    assert re.match(r"Steps 696 to 697: whole step [\d.]+ s; ", after)


def test_the_mouse_reads_one_rank_of_a_map(path):
    """The cell below it, with its rank."""
    with opened(path) as (page, _):
        canvas = page.locator("[data-chart=b-waiting] canvas")
        canvas.scroll_into_view_if_needed()
        canvas.hover(position={"x": 300, "y": 100})
        until(page, "document.querySelector('output[for=b-waiting-at]').textContent.includes('%')")
        told = page.locator("output[for=b-waiting-at]").text_content()

    assert re.match(r"Step \d+: rank \d+ \(node\d+\) [\d.]+ %", told)


def test_turning_the_lights_off_draws_again(path):
    """The colors of the charts are those of the scheme at hand."""
    look = """(() => { const canvas = document.querySelector('[data-chart=b-waiting] canvas');
        return canvas.getContext('2d').getImageData(60, 20, 1, 1).data.join(); })()"""
    with opened(path) as (page, _):
        light = page.evaluate(look)
        page.emulate_media(color_scheme="dark")
        until(page, f"{look} !== '{light}'")
