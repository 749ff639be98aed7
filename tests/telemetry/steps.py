"""A step as events tell of it."""

from evenstep.events import StepMeasured


def measured(step, *, makespan_s=0.2, equal_split_s=0.5, wall_s=None):
    """Return a step of two workers."""
    return StepMeasured(
        step=step,
        plan_epoch=1,
        batch_size=(40, 24),
        compute_s=(0.2, 0.18),
        data_s=(0.0, 0.01),
        idle_s=(0.0, 0.1 * makespan_s),
        makespan_s=makespan_s,
        idle_share=0.05,
        equal_split_s=equal_split_s,
        best_split_s=0.19,
        wall_s=wall_s,
    )
