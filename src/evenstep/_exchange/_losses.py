"""The loss of a worker: what is said of it."""

from __future__ import annotations

from ..exceptions import WorkerLostError


def lost_worker(rank: int, host: str, problem: str, *, done: int, restart: str) -> WorkerLostError:
    """Return the error of a lost worker.

    Args:
        rank: who was lost.
        host: its host name.
        problem: how that was noticed.
        done: the last step complete on all ranks.
        restart: what starts a run anew.
    """
    return WorkerLostError(
        rank,
        f"Rank {rank} on {host} was lost: {problem}. The last step complete on all ranks is "
        f"{done}. Restart the run from its last checkpoint ({restart}); if the worker was only "
        f"slow, raise `Runtime(deadline_s=...)`, or `hang_s` where a step took too long.",
    )
