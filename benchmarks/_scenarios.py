"""What policies are compared on: eight scenarios of ``evenstep.sim``, and the measure.

Constants of a policy are chosen on seeds from 1000, reports are on lower ones.
"""

from __future__ import annotations

from evenstep import sim
from evenstep.policies import AbstractPolicy
from evenstep.sim import Scenario, scenario
from evenstep.sim._scenarios import scenario_names

__all__ = ["NAMES", "Scenario", "regret", "scenario"]

NAMES = scenario_names()[:8]


def regret(policy: AbstractPolicy, given: Scenario, global_batch_size: int = 512) -> float:
    """Return mean step time over that of the plan that knows all but the jitter, less 1."""
    cluster, workload = given.cluster(global_batch_size), given.workload
    return sim.run(policy, cluster, workload).regret(sim.oracle(cluster, workload))
