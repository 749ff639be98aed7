"""Trials are runs against the best plan, standings their means."""

from dataclasses import dataclass, replace

import pytest

from benchmarks._local_sgd import LocalSgd
from benchmarks._stealing import Stealing
from evenstep import sim
from evenstep.planner.claims import AbstractScheme, Bsp, Hybrid
from evenstep.policies import Equal, Fixed

GIVEN = sim.scenario("burst", 4, 30)


@dataclass(frozen=True, slots=True)
class Needy(AbstractScheme):
    """Cannot be built without its argument."""

    num_local_steps: int

    moves_samples = False
    local_steps = begin = turn = None


def test_a_trial_is_the_run_against_the_oracle():
    """By name or by value, whether the oracle is known or not."""
    best_s = sim.oracle_on(GIVEN.cluster(64), GIVEN.workload)
    report = sim.run_on("auto", GIVEN.cluster(64), GIVEN.workload)
    found = sim.trial("auto", GIVEN, 64, best_s=best_s)

    assert found == sim.trial("auto", GIVEN, 64)
    assert found.regret == pytest.approx(report.regret(best_s))
    assert (found.idle_share, found.staleness) == (report.idle_share, 0)
    assert (found.scenario, found.policy, found.scheme) == ("burst", "auto", "bsp")
    assert sim.trial(Equal(), GIVEN, 64) == sim.trial("equal", GIVEN, 64)


def test_moves_cost_a_share_of_the_best_step():
    """The same in every scenario, however long its steps are."""
    best_s = sim.oracle_on(GIVEN.cluster(64), GIVEN.workload).mean()
    scheme = replace(Hybrid(), claim_s=0.02 * best_s)
    named = sim.trial("equal", GIVEN, 64, scheme="hybrid", move_cost=0.02)
    by_value = sim.trial("equal", GIVEN, 64, scheme=scheme)

    assert named.regret == by_value.regret
    assert (named.scheme, by_value.scheme) == ("hybrid", "Hybrid")
    assert named.moves_per_step > 0


def test_schemes_are_found_by_name():
    """With what a move costs; a class of one's own as it is."""
    assert sim.scheme_by_name("bsp") == Bsp()
    assert sim.scheme_by_name("hybrid", move_s=0.5) == Hybrid(claim_s=0.5)
    assert sim.scheme_by_name("evenstep.planner.claims:Hybrid", move_s=0.5) == Hybrid()
    assert sim.scheme_by_name("benchmarks._local_sgd:LocalSgd") == LocalSgd(4)
    assert sim.scheme_by_name("benchmarks._stealing:Stealing") == Stealing()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("Hybrid", "bsp, hybrid or"),
        ("evenstep.planner.claims:Nothing", "imported"),
        ("no.such:Thing", "imported"),
        ("evenstep.policies:Auto", "AbstractScheme"),
        (f"{__name__}:Needy", "needs num_local_steps"),
    ],
)
def test_what_is_no_scheme_is_refused(name, match):
    """With what there is."""
    with pytest.raises(ValueError, match=match):
        sim.scheme_by_name(name)


def test_standings_count_every_scenario_once():
    """Three trials of one and one of another: the mean of two means, the lowest first."""
    one = sim.trial(Fixed((16, 16, 16, 16)), GIVEN, 64)
    trials = [replace(one, regret=regret) for regret in (0.1, 0.2, 0.3)]
    trials.append(replace(one, scenario="other", regret=0.6, staleness=3))
    trials += [replace(one, policy="better", regret=0.3, scenario=name) for name in ("a", "b")]
    better, fixed = sim.standings(trials)

    assert (better.policy, fixed.policy) == ("better", "fixed")
    assert fixed.regret == {"burst": pytest.approx(0.2), "other": 0.6}
    assert (fixed.mean_regret, fixed.staleness) == (pytest.approx(0.4), 3)
