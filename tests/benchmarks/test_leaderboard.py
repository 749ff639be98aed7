"""The leaderboard is of this code."""

import re

import pytest

from benchmarks.leaderboard import NAMES, NUM_SEEDS, played
from tests._snippets import ROOT

PAGE = (ROOT / "evidence" / "leaderboard.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["jitter", pytest.param("step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["equal", "lb-bsp-2018"])
def test_the_page_has_what_policies_lose(name, policy):
    """In percent of the oracle's step, a decimal below ten."""
    row = re.search(rf"^\| {policy} \| (.*) \|$", PAGE, re.M)[1].split(" | ")
    regret = sum(played((policy, name, seed))[0] for seed in range(NUM_SEEDS)) / NUM_SEEDS

    assert float(row[NAMES.index(name)]) == pytest.approx(100 * regret, abs=0.051, rel=0.01)


def test_every_policy_that_needs_no_settings_is_there():
    """Each once."""
    policies = re.findall(r"^\| ([a-z0-9-]+) \| \d", PAGE, re.M)

    assert sorted(policies) == sorted(
        ["auto", "dbs", "dynamic-batching", "equal", "lb-bsp-2018", "lb-bsp-2020", "lbb"]
    )
