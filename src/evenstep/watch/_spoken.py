"""What a watch says of a diagnosis: one line while training runs, some more at the end."""

from __future__ import annotations

from collections.abc import Sequence

from .._diagnosis import Cause, Diagnosis, FoundCause

_WORDS = {
    Cause.SLOW_WORKER: "compute",
    Cause.THROTTLING: "throttling",
    Cause.CONTENTION: "contention",
    Cause.SLOW_BACKWARD: "a slow backward",
    Cause.INPUT: "input",
    Cause.NETWORK: "the network",
    Cause.GARBAGE_COLLECTION: "garbage collection",
    Cause.CHECKPOINT: "a checkpoint",
    Cause.LOGGING: "what the loop does there alone, such as logging",
    Cause.LENGTHS: "the lengths of samples",
    Cause.ROTATING: "changing ranks, and nothing that is measured says why",
    Cause.COMPILATION: "compilation",
    Cause.MEMORY: "memory pressure",
}


def who(rank: int, hosts: Sequence[str]) -> str:
    """Return a rank with its host, where that is known."""
    host = hosts[rank] if rank < len(hosts) else ""
    return f"rank {rank} ({host})" if host else f"rank {rank}"


def sentence(diagnosis: Diagnosis, hosts: Sequence[str]) -> str:
    """Return who waits for whom and why, in one sentence."""
    if not diagnosis.num_steps:
        return f"{diagnosis.no_verdict}."
    waiting = f"{100 * diagnosis.waiting_share:.0f} % of the time is waiting"
    if not diagnosis.found:
        return f"{waiting}: {diagnosis.no_verdict}." if diagnosis.no_verdict else f"{waiting}."
    first, *others = diagnosis.found
    more = "".join(f"; {_because(one, hosts)}" for one in others[:2])
    return f"{waiting}, {_because(first, hosts)}{more}."


def _because(found: FoundCause, hosts: Sequence[str]) -> str:
    reason = f"because of {_WORDS[found.cause]}"
    return reason if found.rank is None else f"for {who(found.rank, hosts)}, {reason}"


def live_line(diagnosis: Diagnosis, hosts: Sequence[str]) -> str:
    """Return the line on the newest steps."""
    lasts = f", {diagnosis.step_s:.3g} s a step" if diagnosis.num_steps else ""
    return f"evenstep watch: step {diagnosis.step}{lasts}: {sentence(diagnosis, hosts)}"


def summary(diagnosis: Diagnosis, hosts: Sequence[str], notes: Sequence[str] = ()) -> str:
    """Return what is said at the end, as lines.

    Args:
        diagnosis: of the whole run.
        hosts: of the ranks.
        notes: more lines, such as what to change.
    """
    lines = [sentence(diagnosis, hosts)]
    if diagnosis.num_steps:
        lines[0] = f"{diagnosis.num_steps} steps, {diagnosis.step_s:.3g} s each: {lines[0]}"
    for found in diagnosis.found:
        lines += [f"  {_heading(found, hosts)}: {found.evidence}", f"    {found.remedy}"]
    return "".join(f"evenstep watch: {line}\n" for line in (*lines, *notes))


def _heading(found: FoundCause, hosts: Sequence[str]) -> str:
    where = "" if found.rank is None else f" of {who(found.rank, hosts)}"
    return f"{found.cause}{where}, {100 * found.lost_share:.0f} % of the time"
