"""Charts in TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from ..events import Event, StepMeasured
from ..exceptions import invalid
from ._metrics import check_has, gauges_of

_MOST_RANKS = 16


class ScalarWriter(Protocol):
    """What is asked of torch's ``SummaryWriter``, or of another one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write a value."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class TensorBoard:
    """A hook that writes the metrics of steps as scalars.

    Tags begin with ``evenstep/``; those of a rank end with its number. A scalar takes 20
    microseconds of Python's time, so all of them would slow training down. Only every tenth step is
    written, and with more than 16 ranks quantiles and the largest values. Counters are left out.

    Usage:
        hooks = (TensorBoard(SummaryWriter("runs/mine")),)

    Args:
        writer: such as ``torch.utils.tensorboard.SummaryWriter``. Close it yourself after the run.
        every: number of steps of which one is written, at least 1; 1 writes all.

    Raises:
        ValueError: ``writer`` cannot write scalars, or ``every`` is below 1.
    """

    writer: ScalarWriter
    every: int = 10

    def __post_init__(self) -> None:
        example = "a `torch.utils.tensorboard.SummaryWriter`"
        check_has("TensorBoard(writer=...)", self.writer, "add_scalar", example)
        if self.every < 1:
            rule = "be at least 1"
            raise invalid("TensorBoard(every=...)", rule, self.every, "Use 1 for all steps.")

    def __call__(self, event: Event) -> None:
        """Write what the event says of its step."""
        step = getattr(event, "step", None)
        if step is None or (isinstance(event, StepMeasured) and step % self.every):
            return
        for name, value, labels in gauges_of(event, most_ranks=_MOST_RANKS):
            tag = "/".join([name.replace(".", "/", 1), *(value for _, value in labels)])
            self.writer.add_scalar(tag, value, step)
