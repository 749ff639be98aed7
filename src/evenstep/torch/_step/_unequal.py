"""What is said of a script that fails where ranks have different numbers of samples."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from types import TracebackType

from ._conductor import StepConductor

_MOST_VIEWS = 8  # of each sample, in the sizes that an error names


def hint_of_rows(steps: StepConductor) -> str:
    """Return what to do if a collective over rows has ended a rank; nothing if none could."""
    recorder, sizes = steps.open_recorder, _sizes(steps)
    if recorder is None or not recorder.has_others or len(set(sizes)) < 2:
        return ""
    return (
        f"; if that was in a collective of the script's own over rows, such as `all_gather` of "
        f"features: ranks have {_listed(sizes)} samples in this step, so pad the rows to "
        f"{max(sizes)}, or use `Balancer(policy='equal')`"
    )


def note_sizes(error: BaseException, steps: StepConductor) -> None:
    """Add to an error that ends the script, and names a batch size, that this rank has another one.

    As where labels or masks are made for `args.batch_size` rows. Errors of evenstep's own say what
    there is to say.
    """
    sizes, num_samples = _sizes(steps), steps.newest_num_samples  # its loop may be over by now
    equal = sum(sizes) // len(sizes) if sizes else 0
    if not equal or num_samples in (None, 0, equal) or not isinstance(error, _OF_SHAPES):
        return
    if _is_own(error.__traceback__) or not _names(str(error), (equal, num_samples)):
        return
    note = (
        f"evenstep: this rank has {num_samples} samples in this step, not {equal} as in an equal "
        f"split; ranks have {_listed(sizes)}. What is made for a fixed batch size, such as labels "
        f"or masks, does not fit: take `len(batch)`, or use `Balancer(policy='equal')`."
    )
    error.add_note(note)
    if getattr(sys, "last_value", None) is error:  # it was printed already: no `with` block
        logging.getLogger("evenstep").error("%s", note)


_OF_SHAPES = (RuntimeError, IndexError, ValueError, AssertionError)


def _sizes(steps: StepConductor) -> tuple[int, ...]:
    return () if steps.plan is None else steps.plan.batch_size


def _names(text: str, sizes: Sequence[int]) -> bool:
    """Return whether a text has one of ``sizes``, or some views of it, among its numbers."""
    numbers = {int(number) for number in re.findall(r"\b\d{1,9}\b", text)}
    wanted = {size * views for size in sizes for views in range(1, _MOST_VIEWS + 1)}
    return not numbers.isdisjoint(wanted - {1})


def _is_own(trace: TracebackType | None) -> bool:
    name = ""
    while trace is not None:
        name, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return name.partition(".")[0] == "evenstep"


def _listed(sizes: Sequence[int]) -> str:
    """Return the sizes in words, at most eight of them."""
    shown = [str(size) for size in sizes[:8]]
    if len(sizes) > len(shown):
        return f"{', '.join(shown)}, ... (from {min(sizes)} to {max(sizes)})"
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
