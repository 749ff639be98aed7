"""Steps of a run as a planner by cost sees them, for its tests."""

from __future__ import annotations


class Playing:
    """Shows a planner one step after another, and keeps what came of them.

    Args:
        planner: is shown them.

    Attributes:
        plans: in the order in which they were made.
        events: likewise.
    """

    def __init__(self, planner):
        self.planner = planner
        self.plans, self.events = [planner.plan], []

    def step(self, step, **changed):
        """Run a step, and show what was measured in it."""
        raise NotImplementedError

    def run(self, num_steps, first=0):
        """Run some steps."""
        for step in range(first, first + num_steps):
            self.step(step)
        return self

    def plan_of(self, step):
        """Return the plan that is in force."""
        return next(plan for plan in reversed(self.plans) if plan.first_step <= step)

    def show(self, reports):
        """Show the reports of a step, and have what was put off made up for."""
        after = reports[0].step + 1
        self.events += self.planner.observe(reports, next_step=after)
        self.events += self.planner.catch_up(next_step=after + 1)
        if self.planner.plan.epoch != self.plans[-1].epoch:
            self.plans.append(self.planner.plan)
