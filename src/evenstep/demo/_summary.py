"""What the two runs show, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ._recording import Recording

_SETTLED = 1.05  # a step counts as balanced within that factor of the run's usual one


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run in numbers.

    Attributes:
        step_s: median time of a step, communication and optimizer included.
        total_s: all steps together.
        idle_share: share of the workers' time spent waiting for the slowest in a step, the median,
            in [0, 1).
        idle_share_of_all: the same of all steps together, those of learning included.
        batch_size: samples per rank in the last step.
        samples_per_s: samples over all workers and the median step time.
        final_loss: mean over the last steps, a tenth of the run.
    """

    step_s: float
    total_s: float
    idle_share: float
    idle_share_of_all: float
    batch_size: tuple[int, ...]
    samples_per_s: float
    final_loss: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The demo's result.

    Attributes:
        num_steps: optimizer steps of each run.
        equal: the run with equal shares.
        balanced: the run with balanced shares.
        speed_up: total time of the equal run over that of the balanced one, learning included.
        steps_to_balance: steps until the balanced run stayed within 5 % of its usual makespan.
        communication_s: averaging the gradients with all workers aligned, measured apart.
        compute_limit_s: global batch over the sum of the workers' own speeds.
        limit_s: both together: no split of the batch can be faster.
        share_of_limit: ``limit_s`` over the balanced run's median step, 1 is perfect.
        loss_difference: largest difference between the two loss curves.
        reference_difference: the same between the equal run and one with a single worker:
            what rounding alone does. None if there was no such run.
        balanced_reference_difference: the same between the balanced run and the single worker.
        late_share: share of the steps in which emulation could not keep up; above a few percent
            the machine was too busy for the figures to mean much.
    """

    num_steps: int
    equal: RunFigures
    balanced: RunFigures
    speed_up: float
    steps_to_balance: int
    communication_s: float
    compute_limit_s: float
    limit_s: float
    share_of_limit: float
    loss_difference: float
    reference_difference: float | None
    balanced_reference_difference: float | None
    late_share: float


def summarise(
    equal: Recording,
    balanced: Recording,
    reference: Recording | None = None,
    *,
    speeds: Sequence[float] | None = None,
) -> Summary:
    r"""Return what complete recordings of the runs show.

    The physical limit of a step is $B / \sum_i v_i + c$: all workers busy all the time at their own
    speeds $v_i$ in samples/s, then the gradients averaged in $c$ seconds with no worker late. With
    emulated speeds $v_i$ is exact; otherwise it is what each worker reached in the second half of
    the balanced run, which takes a fixed cost per step for part of its speed.
    """
    measured = balanced.measured or {}
    one, other = _figures(equal), _figures(balanced)
    if speeds is None:
        compute_limit_s = balanced.global_batch_size / sum(_own_speeds(balanced))
    else:
        per_sample_s = measured["seconds_per_sample"]
        compute_limit_s = balanced.global_batch_size * per_sample_s / sum(speeds)
    communication_s = min(
        run.measured["communication_s"] for run in (equal, balanced) if run.measured is not None
    )
    limit_s = compute_limit_s + communication_s
    return Summary(
        num_steps=balanced.num_done,
        equal=one,
        balanced=other,
        speed_up=one.total_s / other.total_s,
        steps_to_balance=_steps_to_balance(balanced),
        communication_s=communication_s,
        compute_limit_s=compute_limit_s,
        limit_s=limit_s,
        share_of_limit=limit_s / other.step_s,
        loss_difference=_largest_difference(equal.loss, balanced.loss),
        reference_difference=_difference_from(reference, equal),
        balanced_reference_difference=_difference_from(reference, balanced),
        late_share=max(run.late_steps / run.num_done for run in (equal, balanced)),
    )


def _figures(run: Recording) -> RunFigures:
    walls = run.known_wall_s()
    step_s = median(walls)
    last = max(1, len(run.loss) // 10)
    return RunFigures(
        step_s=step_s,
        # A step without a time of its own, the first, counts as a usual one.
        total_s=sum(walls) + step_s * (run.num_done - len(walls)),
        idle_share=median(
            sum(idle_s) / (len(idle_s) * makespan_s)
            for idle_s, makespan_s in zip(run.idle_s, run.makespan_s, strict=True)
        ),
        idle_share_of_all=run.idle_share(),
        batch_size=run.batch_size[-1],
        samples_per_s=run.global_batch_size / step_s,
        final_loss=sum(run.loss[-last:]) / last,
    )


def _own_speeds(run: Recording) -> list[float]:
    """Return every worker's own samples/s in the second half of the run."""
    half = run.num_done // 2
    per_step = [
        [size / max(compute_s, 1e-9) for size, compute_s in zip(sizes, computes, strict=True)]
        for sizes, computes in zip(run.batch_size[half:], run.compute_s[half:], strict=True)
    ]
    return [median(column) for column in zip(*per_step, strict=True)]


def _steps_to_balance(run: Recording) -> int:
    """Return the first step that, like most after it, costs about what a late step does."""
    usual_s = median(run.makespan_s[run.num_done // 2 :])
    return next(step for step, cost_s in enumerate(run.makespan_s) if cost_s <= _SETTLED * usual_s)


def _difference_from(reference: Recording | None, run: Recording) -> float | None:
    return None if reference is None else _largest_difference(run.loss, reference.loss)


def _largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
