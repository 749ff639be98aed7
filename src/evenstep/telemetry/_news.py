"""What a person has to know at once, in whole sentences."""

from __future__ import annotations

from ..events import (
    BalancingStopped,
    ClaimsSwitched,
    Event,
    MemoryCapped,
    MemoryShort,
    SharesPlanned,
    SizesHeld,
    WorkerDropped,
    WorkerKept,
    WorkerUnhelpful,
)

_CLAIMS = {
    True: "begin with a part of their batch and claim the rest during the step (work stealing), as "
    "long as that is faster",
    False: "compute their planned batch, without claims",
}


def news(event: Event) -> str:
    """Return a line on ``event``; nothing where no person has to know it at once."""
    match event:
        case MemoryShort() | SizesHeld() | MemoryCapped() | ClaimsSwitched():
            return f"step {event.step}: {_of_sizes(event)}"
        case WorkerUnhelpful() | WorkerDropped() | WorkerKept():
            return f"step {event.step}: rank {event.rank} {_of_worker(event)}"
        case SharesPlanned():
            return f"step {event.step}: from now on, {_shares(event)}"
        case BalancingStopped(step=step, rank=rank, problem=problem):
            return (
                f"step {step}: balancing is off for the rest of the run, with equal batch sizes: "
                f"{problem} on rank {rank}"
            )
        case _:
            return ""


def _of_sizes(event: MemoryShort | SizesHeld | MemoryCapped | ClaimsSwitched) -> str:
    match event:
        case MemoryShort(problem=problem):
            return (
                f"the global batch does not fit in memory ({problem}); sizes stay as they are. "
                f"Loops over `loader.steps()` take it in micro-batches"
            )
        case SizesHeld(rank=rank):
            return (
                f"sizes stay as they are: torch might run the model of rank {rank} uncompiled at "
                f"another size"
            )
        case MemoryCapped(rank=rank, max_batch_size=most):
            return f"rank {rank} fits at most {most} samples"
        case ClaimsSwitched(on=on):
            return f"from now on, workers {_CLAIMS[on]}"


def _of_worker(event: WorkerUnhelpful | WorkerDropped | WorkerKept) -> str:
    match event:
        case WorkerUnhelpful(with_s=with_s, without_s=without_s):
            return (
                f"costs more than it brings: steps of {with_s:.3g} s with all, {without_s:.3g} s "
                f"with those that help. Start without it next time"
            )
        case WorkerDropped(host=host):
            return (
                f"on {host} leaves the run. The others restart without it, from the checkpoint "
                f"of this stop"
            )
        case WorkerKept(obstacle=obstacle):
            return f"cannot be dropped: {obstacle}"


def _shares(event: SharesPlanned) -> str:
    """Return who sums the gradients from now on and why, as a sentence."""
    if event.parts is None:
        return f"gradients are summed by {event.reason}"  # which begins with how
    whole = sum(event.parts)
    shares = [f"{100 * part / whole:.0f}" for part in event.parts]
    if len(shares) > 16:
        number = sum(part > 0 for part in event.parts)
        return f"{number} ranks sum shares of the gradients ({event.reason})"
    return f"each rank sums its share of the gradients, {' '.join(shares)} % ({event.reason})"
