"""What docs/recipes/two-cards.md prints is what its command prints."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from .._snippets import ROOT, blocks
from .started import environment

PAGE = ROOT / "docs" / "recipes" / "two-cards.md"
(BLOCK,) = blocks(PAGE, "console")


def answer(command):
    done = subprocess.run(
        shlex.split(command), text=True, capture_output=True, env=environment(COLUMNS="100")
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def exchanged_ms(said):
    return int(re.search(r"plain all-reduce +(\d+) ms", said)[1])


def test_the_plan_says_what_the_page_says():
    """Line by line; three dots stand for lines that are left out."""
    command, _, shown = BLOCK.removeprefix("$ ").partition("\n")
    said = answer(command)
    pieces = [piece.strip("\n") for piece in shown.split("...\n") if piece.strip()]

    assert len(pieces) == 2
    assert [piece for piece in pieces if piece not in said] == []
    assert exchanged_ms(said) > int(re.search(r"(\d+) ms \(\+33 %\)", said)[1])


def test_a_smaller_model_pays_as_the_page_says():
    """The figure in the text is that of the same command with fewer gradients."""
    command = BLOCK.removeprefix("$ ").partition("\n")[0].replace("-mb 500", "-mb 100")
    (text,) = re.findall(r"`--model-mb 100`\)\s+a step takes (\d+) ms", PAGE.read_text("utf-8"))

    assert int(text) == exchanged_ms(answer(command)) < 213


@pytest.mark.parametrize("mbit", ["160000", "24000", "6400"])
def test_slots_have_the_speed_of_their_payload(mbit):
    """Gbit of the option are eight times the GB of the table."""
    (payload,) = re.findall(rf"\| ([\d.]+) GB/s \| {mbit} \|", PAGE.read_text("utf-8"))

    assert float(payload) * 8000 == float(mbit)
