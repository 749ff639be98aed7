"""Runs against the best plan, and the lines of the leaderboard as their means."""

from dataclasses import dataclass, replace

import pytest

from benchmarks._local_sgd import LocalSgd
from benchmarks._stealing import Stealing
from evenstep import sim
from evenstep.claims import AbstractScheme, Bsp, Hybrid
from evenstep.cli._board import Leaderboard
from evenstep.cli._contest import Contest
from evenstep.cli._trials import Case, play, scheme_by_name

CASE = Case("burst", 64, world_size=4, num_steps=30, seed=0)
GIVEN = CASE.given()


@dataclass(frozen=True, slots=True)
class Needy(AbstractScheme):
    """Cannot be built without its argument."""

    num_local_steps: int

    moves_samples = False
    local_steps = begin = turn = None


def test_a_run_is_compared_with_the_oracle():
    """What the simulator says of both."""
    best_s = sim.oracle(GIVEN.cluster(64), GIVEN.workload)
    report = sim.run("auto", GIVEN.cluster(64), GIVEN.workload)
    found = play((CASE, "auto", "bsp", 0.01))

    assert found.regret == pytest.approx(report.regret(best_s))
    assert (found.idle_share, found.staleness) == (report.idle_share, 0)
    assert (found.scenario, found.policy, found.scheme) == ("burst", "auto", "bsp")


def test_moves_cost_a_share_of_the_best_step():
    """The same in every scenario, however long its steps are."""
    best_s = sim.oracle(GIVEN.cluster(64), GIVEN.workload)
    scheme = Hybrid(claim_s=0.02 * best_s.mean())
    by_value = sim.run("equal", GIVEN.cluster(64), GIVEN.workload, scheme=scheme)
    named = play((CASE, "equal", "hybrid", 0.02))

    assert named.regret == pytest.approx(by_value.regret(best_s))
    assert named.moves_per_step > 0


def test_schemes_are_found_by_name():
    """With what a move costs; a class of one's own as it is."""
    assert scheme_by_name("bsp") == Bsp()
    assert scheme_by_name("hybrid", claim_s=0.5) == Hybrid(claim_s=0.5)
    assert scheme_by_name("evenstep.claims:Hybrid", claim_s=0.5) == Hybrid()
    assert scheme_by_name("benchmarks._local_sgd:LocalSgd") == LocalSgd(4)
    assert scheme_by_name("benchmarks._stealing:Stealing") == Stealing()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("Hybrid", "bsp, hybrid or"),
        ("evenstep.claims:Nothing", "imported"),
        ("no.such:Thing", "imported"),
        ("evenstep.policies:Auto", "AbstractScheme"),
        (f"{__name__}:Needy", "needs num_local_steps"),
    ],
)
def test_what_is_no_scheme_is_refused(name, match):
    """With what there is."""
    with pytest.raises(ValueError, match=match):
        scheme_by_name(name)


def test_lines_count_every_scenario_once():
    """Three runs of one and one of another: the mean of two means, the lowest first."""
    one = play((CASE, "equal", "bsp", 0.01))
    runs = [replace(one, regret=regret) for regret in (0.1, 0.2, 0.3)]
    runs.append(replace(one, scenario="other", regret=0.6, staleness=3))
    runs += [replace(one, policy="better", regret=0.3, scenario=name) for name in ("a", "b")]
    better, equal = Leaderboard(Contest((), (), (), 0.01, None, ""), tuple(runs)).lines

    assert (better.policy, equal.policy) == ("better", "equal")
    assert equal.regret == {"burst": pytest.approx(0.2), "other": 0.6}
    assert (equal.mean_regret, equal.staleness) == (pytest.approx(0.4), 3)
