"""A page in headless Chromium: what it asks the network for, what it complains of, how it looks."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (  # it looks for updates otherwise
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_DRAWN = "[...document.querySelectorAll('[data-chart]')].every(box => box.querySelector('canvas'))"
SERIOUS = ("serious", "critical")


@dataclass(slots=True)
class Seen:
    """What a page did.

    Attributes:
        requests: what it asked for, besides itself.
        complaints: errors and warnings of its console, and exceptions.
        opened_s: seconds until its charts were drawn.
    """

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    opened_s: float = 0.0


def missing() -> str:
    """Return why there is no browser, in words; nothing where there is one."""
    if importlib.util.find_spec("playwright") is None:
        return "needs playwright and axe-playwright-python: `pip install -e '.[browser]'`"
    if not any(map(shutil.which, _PROGRAMS)):
        return "needs Chromium: `apt-get install chromium`"
    return ""


@contextmanager
def opened(
    path: Path, *, width: int = 1200, height: int = 900, dark: bool = False
) -> Iterator[tuple[Any, Seen]]:
    """Open a file in Chromium, and give its page and what it did."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, _PROGRAMS)))
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=program, args=["--no-sandbox", *_QUIET], headless=True
        )
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            device_scale_factor=1,
        )
        seen = Seen()
        address = path.absolute().as_uri()
        page.on("request", lambda asked: asked.url != address and seen.requests.append(asked.url))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on(
            "console",
            lambda said: said.type in ("error", "warning") and seen.complaints.append(said.text),
        )
        start = perf_counter()
        page.goto(address)
        until(page, _DRAWN)
        seen.opened_s = perf_counter() - start
        try:
            yield page, seen
        finally:
            browser.close()


def until(page: Any, condition: str, *, timeout_s: float = 30.0) -> None:
    """Wait until a condition in JavaScript is true.

    Playwright's own way to wait is refused by pages that forbid to run text as a program.
    """
    end = perf_counter() + timeout_s
    while not page.evaluate(condition):
        if perf_counter() > end:
            raise TimeoutError(f"never true within {timeout_s} s: {condition}")
        page.wait_for_timeout(20)


def violations(page: Any) -> list[str]:
    """Return what axe finds that is serious: the rule, and where."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['html'][:120]}"
        for one in found
        if one["impact"] in SERIOUS
        for node in one["nodes"][:3]
    ]
