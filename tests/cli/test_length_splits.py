"""Lengths on the command line: what they and the speeds save, each alone and both."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from . import app

TYPED = ["--speeds", "100,80,20", "--global-batch-size", "256"]


def called(*arguments):
    """The answer in lines that are not wrapped, wherever the tests run."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, arguments)))


def answer(*arguments):
    """What a program reads; stderr is no part of it."""
    result = called(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_lengths_show_what_each_saves_alone(tmp_path):
    """With speeds 1:1:2:4 both come near the bound; in words, in JSON, from a file too."""
    asked = ["--speeds", "1,1,2,4", "--global-batch-size", "32", "--lengths"]
    found = answer("plan", *asked, "fine-tuning")["lengths"]
    text = called("plan", *asked, "fine-tuning").stdout
    file = tmp_path / "lengths.txt"
    file.write_text("7\n" * 100)
    same = answer("plan", *asked, file)["lengths"]

    assert found["equal_s"] > max(found["speed_s"], found["length_s"])
    assert found["bound_s"] <= found["both_s"] < 1.02 * found["bound_s"]
    saved = [round(100 * (1 - found[name] / found["equal_s"])) for name in ("speed_s", "length_s")]
    assert f"speeds alone save {saved[0]} %, lengths alone {saved[1]} %" in text
    assert re.search(r"^by both +\S+ s +2\.\d\d$", text, re.M)
    assert same["equal_s"] == same["length_s"] == pytest.approx(8.0)  # as without lengths
    assert same["speed_s"] == pytest.approx(4.0)


def test_overhead_counts_in_steps_with_lengths():
    """As in every other line."""
    asked = [*TYPED, "--lengths", "uniform"]
    plain, more = (
        answer("plan", *asked)["lengths"],
        answer("plan", *asked, "--overhead", "0.5")["lengths"],
    )

    assert more["both_s"] == pytest.approx(plain["both_s"] + 0.5)
    assert more["bound_s"] == pytest.approx(plain["bound_s"] + 0.5)


def test_padding_makes_equal_counts_slower():
    """And attention makes long samples dearer."""
    asked = ["--speeds", "1,1", "--global-batch-size", "16", "--lengths", "fine-tuning"]
    ratios = []
    for option in (["--hidden-size", "0"], [], ["--hidden-size", "64"], ["--padded"]):
        found = answer("plan", *asked, *option)["lengths"]
        ratios.append(found["equal_s"] / found["bound_s"])

    assert ratios == sorted(ratios)
    assert ratios[2] > 1.1 * ratios[0]
    assert ratios[3] > 1.5 * ratios[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--padded"], "--padded"),
        (["--hidden-size", "9"], "--hidden-size"),
        (["--lengths", "/no/such.txt"], "/no/such.txt"),
        (["--lengths", "uniform", "--global-batch-size", "1000000000"], "from 1 to 1,000,000"),
        (["--lengths", "uniform", "--hidden-size", "-1"], "--hidden-size` must be from 0"),
        (["--lengths", "uniform", "--hidden-size", "9" * 400], "--hidden-size` must be from 0"),
        (["--lengths", "uniform", "--max", "200"], "--lengths"),
    ],
)
def test_lengths_that_cannot_be_planned_for(arguments, words):
    """In words that name the option, with nothing on stdout."""
    result = called("plan", *TYPED, *arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


@pytest.mark.parametrize("content", [b"12\nmany\n", b"1.5\n", b"", b"3\n-1\n", b"\xff\xfe", b"0\n"])
def test_a_file_of_anything_else_is_refused(tmp_path, content):
    """With its name."""
    for name in ("lengths.txt", "lengths.npy"):
        file = tmp_path / name
        file.write_bytes(content)
        result = called("plan", *TYPED, "--lengths", file)

        assert result.exit_code == 2
        assert name in result.stderr


def test_an_array_of_lengths_is_read(tmp_path):
    """As numpy saves it; the same as text, with the first bytes of a spreadsheet's."""
    lengths = np.random.default_rng(0).integers(1, 500, 400)
    np.save(tmp_path / "lengths.npy", lengths)
    text = "\n".join(map(str, lengths))
    (tmp_path / "lengths.txt").write_text(text, encoding="utf-8-sig")
    found = [
        answer("plan", *TYPED, "--lengths", tmp_path / f"lengths.{end}") for end in ("npy", "txt")
    ]

    assert found[0] == found[1]
