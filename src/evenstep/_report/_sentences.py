"""What the figures of a run mean, in sentences."""

from __future__ import annotations

from .._render import number, percent, seconds
from ._read_figures import KnownCause, ReportFigures
from ._step_tally import PARTS

LABELS = {
    "input_s": "input",
    "forward_s": "forward",
    "backward_s": "backward",
    "communication_s": "communication",
    "waiting_s": "waiting for others",
    "optimizer_s": "optimizer",
    "evaluation_s": "evaluation",
    "checkpoint_s": "checkpoints",
    "rest_s": "rest of the loop",
}
"""What a part of a step is called."""

assert tuple(LABELS) == PARTS


def lasting(value: float) -> str:
    """Return a long time in the unit that suits it."""
    size = abs(value)
    if size >= 3600:
        return f"{number(value / 3600)} hours"
    if size >= 60:
        return f"{number(value / 60)} minutes"
    return seconds(value) if size else "0 s"


def ended(words: str) -> str:
    """Return words with a full stop at their end."""
    return words if words.endswith((".", "!", "?")) else f"{words}."


def headline(run: ReportFigures) -> str:
    """Return what was saved, in a sentence."""
    steps = run.steps
    if steps.saved_share is None:
        return (
            "What the equal split would have taken is not known: the times of the workers were "
            "not fitted in this run."
        )
    if run.keeps_equal:
        return (
            "The split was equal, so nothing was saved. The best split would have saved "
            f"{lasting(steps.left_s)} of computing."
        )
    verb = "saved" if steps.saved_s >= 0 else "cost"
    return (
        f"Balancing {verb} {lasting(abs(steps.saved_s))} against the equal split: "
        f"{percent(abs(steps.saved_share))} % of the time that it would have taken."
    )


def saved(run: ReportFigures) -> str:
    """Return what was saved against the equal split, as a table has it."""
    steps = run.steps
    if run.keeps_equal:
        return "nothing: it was kept"
    if steps.saved_share is None:
        return "unknown"
    return f"{lasting(steps.saved_s)}, {percent(steps.saved_share)} %"


def still_lost(run: ReportFigures) -> str:
    """Return what is still lost, and why, as sentences."""
    waiting = waiting_share(run)
    sentences = [f"Ranks wait for each other {percent(waiting)} % of their time."]
    if run.diagnosed and run.diagnosed.causes:
        worst = run.diagnosed.causes[0]
        sentences.append(f"The costliest cause is {_cause(run, worst)}: {ended(worst.evidence)}")
    elif run.diagnosed and run.diagnosed.no_verdict:
        sentences.append(f"No cause is named: {ended(run.diagnosed.no_verdict)}")
    elif run.steps.caused_s.sum() > 0:
        rank = int(run.steps.caused_s.argmax())
        share = run.steps.caused_s[rank] / run.steps.caused_s.sum()
        sentences.append(
            f"{percent(share)} % of the waiting for computing is for {rank_name(run, rank)}."
        )
    if run.accounts is not None:
        spent = run.accounts.rank_part_s.sum(axis=0)
        other = {PARTS[at]: spent[at] / spent.sum() for at in range(len(PARTS)) if spent.sum()}
        parts = [
            f"{LABELS[name]} {percent(other[name])} %" for name in _EXPOSED if other[name] > 0.01
        ]
        if parts:
            sentences.append(f"Besides, {', '.join(parts)}.")
    left = run.steps.left_s
    if left > 0.01 * run.steps.elapsed_s:
        sentences.append(f"A perfect split of every step would have saved another {lasting(left)}.")
    return " ".join(sentences)


_EXPOSED = ("input_s", "communication_s", "evaluation_s", "checkpoint_s")


def waiting_share(run: ReportFigures) -> float:
    """Return the part of all ranks' time that they wait: of accounts, or else of computing."""
    if run.accounts is None:
        return run.steps.waiting_share
    spent = run.accounts.rank_part_s.sum(axis=0)
    return float(spent[PARTS.index("waiting_s")] / spent.sum()) if spent.sum() else 0.0


def rank_name(run: ReportFigures, rank: int) -> str:
    """Return a rank with its host, where that is known."""
    if run.start is None or not 0 <= rank < len(run.start.hosts):
        return f"rank {rank}"
    return f"rank {rank} ({run.start.hosts[rank]})"


def _cause(run: ReportFigures, cause: KnownCause) -> str:
    """Return a cause with its rank, where it has one."""
    return cause.cause if cause.rank < 0 else f"{cause.cause} on {rank_name(run, cause.rank)}"


def differences(first: ReportFigures, second: ReportFigures, name: str) -> list[str]:
    """Return how the second run, called ``name``, differs from the first, a sentence each."""
    sentences = []
    steps = [run.steps.elapsed_s / run.num_steps for run in (first, second)]
    ratio = steps[1] / steps[0] if steps[0] else 1.0
    if abs(ratio - 1) < 0.01:
        sentences.append(f"A step takes as long in both, {seconds(steps[0])}.")
    else:
        word = "shorter" if ratio < 1 else "longer"
        sentences.append(
            f"A step of {name} is {percent(abs(1 - ratio))} % {word}: {seconds(steps[1])} "
            f"against {seconds(steps[0])}."
        )
    waiting = [waiting_share(run) for run in (first, second)]
    sentences.append(
        f"Ranks wait {percent(waiting[1])} % of their time against {percent(waiting[0])} %."
    )
    before, after = _settings(first), _settings(second)
    sentences += [
        f"{name}: {after[name]} against {before[name]}."
        for name in before
        if before[name] != after[name]
    ]
    return sentences


def _settings(run: ReportFigures) -> dict[str, str]:
    """Return what two runs are compared by, besides their times."""
    cause = run.diagnosed.causes[0] if run.diagnosed and run.diagnosed.causes else None
    return {
        "Ranks": f"{run.world_size}",
        "Samples of a step": f"{run.start.global_batch_size:,}" if run.start else "unknown",
        "Policy": run.start.policy if run.start else "unknown",
        "Costliest cause": _cause(run, cause) if cause else "none",
    }
