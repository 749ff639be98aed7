"""What a person asks of the demo is honoured or refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.demo._settings import SPEEDS, choose


def asked(*, cards=0, **options):
    given = {"workers": None, "speeds": None, "policy": "auto", "device": "auto", "steps": None}
    return choose(**{**given, "out": Path("runs"), **options}, count_cards=lambda: cards)


def test_without_cards_four_unlike_workers_are_emulated():
    """The plain command works everywhere."""
    settings = asked()

    assert (settings.device, settings.num_workers, settings.speeds) == ("cpu", 4, SPEEDS)


@pytest.mark.parametrize("cards", [2, 8])
def test_cards_are_used_as_they_are(cards):
    """One worker per card, at its own speed."""
    settings = asked(cards=cards)

    assert (settings.device, settings.num_workers, settings.speeds) == ("cuda", cards, None)


def test_one_card_is_not_enough_to_share():
    """Auto then emulates on the CPU."""
    assert asked(cards=1).device == "cpu"


def test_speeds_given_mean_emulation():
    """Whoever names speeds does not mean the cards'."""
    settings = asked(cards=4, speeds=(1.0, 0.25))

    assert (settings.device, settings.speeds) == ("cpu", (1.0, 0.25))


def test_more_workers_than_speeds_take_them_in_turn():
    """Six workers: the four speeds, then the first two again."""
    assert asked(workers=6).speeds == (*SPEEDS, *SPEEDS[:2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 1}, "--workers` must be at least 2, got 1. One has no other"),
        ({"workers": 3, "speeds": (1.0, 2.0)}, "one speed for each of 3 workers, got 2 of them."),
        ({"speeds": (1.0,)}, "name two or more, got (1.0,). Write 1,1/2,1/3 say."),
        ({"device": "tpu"}, "--device` must be one of auto, cpu, cuda, got tpu."),
        ({"device": "cuda", "cards": 1}, "2 CUDA cards or more, one per worker, got 1."),
        ({"device": "cuda", "cards": 2, "workers": 3}, "3 CUDA cards or more"),
        (
            {"device": "cuda", "cards": 2, "speeds": (1.0, 2.0)},
            "be left out on cards, got (1.0, 2.0).",
        ),
        ({"steps": 3}, "--steps` must be at least 10, got 3."),
        ({"policy": "fastest"}, "fastest"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options, words):
    """The option, the rule, the value, the remedy."""
    with pytest.raises(ValueError, match="must") as caught:
        asked(**options)

    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["equal", "balanced", "reference"])
def test_a_folder_of_the_users_is_not_in_the_way(name, tmp_path):
    """The demo's folders replace its own of before, and nothing else."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "data.csv").write_text("1,2\n")
    with pytest.raises(ValueError, match="must") as caught:
        asked(out=tmp_path)
    assert f"no `{name}` of another making, got {folder}." in str(caught.value)

    (folder / "job.json").write_text("{}")
    assert asked(out=tmp_path).out == tmp_path
