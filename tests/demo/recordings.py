"""Runs of made-up times, as the demo would have recorded them."""

from __future__ import annotations

from evenstep.demo._recording import Recording

OVERHEAD_S = 0.01
PER_SAMPLE_S = 0.004


def recording(sizes, speeds, *, num_steps=20, loss=2.0, communication_s=0.006):
    """A run in which every worker keeps exactly to its speed."""
    run = Recording()
    run.add({"event": "Phase", "text": "training"})
    run.add(
        {
            "event": "Measured",
            "communication_s": communication_s,
            "seconds_per_sample": PER_SAMPLE_S,
            "num_steps": num_steps,
        }
    )
    run.add({"event": "RunStarted", "num_steps": num_steps, "global_batch_size": sum(sizes[-1])})
    for step in range(num_steps):
        run.add(step_record(step, sizes[min(step, len(sizes) - 1)], speeds))
    run.add({"event": "Losses", "first_step": 0, "loss": [loss / (step + 1) for step in range(20)]})
    run.add({"event": "RunEnded", "num_steps": num_steps})
    run.add({"event": "Done", "late_steps": 0})
    return run


def step_record(step, sizes, speeds):
    """The event of one step."""
    compute_s = [PER_SAMPLE_S * b / v for b, v in zip(sizes, speeds, strict=True)]
    makespan_s = max(compute_s)
    return {
        "event": "StepMeasured",
        "step": step,
        "batch_size": sizes,
        "compute_s": compute_s,
        "idle_s": [makespan_s - own_s for own_s in compute_s],
        "makespan_s": makespan_s,
        "wall_s": None if step == 0 else makespan_s + OVERHEAD_S,
    }
