"""What one training run of the demo is told, and where it leaves what it learnt."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Size:
    """How large a GPT, on how much text.

    Attributes:
        width: numbers per token, a multiple of ``num_heads``.
        num_layers: transformer blocks.
        num_heads: attention heads per block.
        context: bytes of text that one sample holds.
        batch_size: samples per worker at the equal split.
    """

    width: int
    num_layers: int
    num_heads: int
    context: int
    batch_size: int


SMALL = Size(width=64, num_layers=2, num_heads=4, context=64, batch_size=24)
"""Costs about 1 ms per sample on one core, so that two cores can play many workers."""

LARGE = Size(width=512, num_layers=8, num_heads=8, context=256, batch_size=64)
"""Large enough to keep a recent card busy for tens of milliseconds a step."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training run: the same text and weights as its siblings, its own policy.

    Attributes:
        size: model and batch.
        global_batch_size: samples per optimizer step over all workers.
        policy: name of the policy, or ``"module:Class"``.
        device: ``"cpu"`` or ``"cuda"``, one card per process.
        speeds: emulated speeds, one per worker; None leaves the workers as fast as they are.
        num_steps: optimizer steps; None takes as many as fit in ``budget_s``.
        budget_s: seconds for the equal and the balanced run together, where the number of steps
            is left open.
        seconds_per_sample: emulated cost of one sample at speed 1; None measures the machine and
            chooses.
        seed: of the weights and of the order of the text.
    """

    size: Size
    global_batch_size: int
    policy: str
    device: str
    speeds: tuple[float, ...] | None
    num_steps: int | None
    budget_s: float
    seconds_per_sample: float | None
    seed: int

    def save(self, run_dir: Path) -> None:
        """Write it where ``load`` looks."""
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "job.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> TrainingJob:
        """Return the job saved in ``run_dir``."""
        fields = json.loads((run_dir / "job.json").read_text())
        fields["size"] = Size(**fields["size"])
        if fields["speeds"] is not None:
            fields["speeds"] = tuple(fields["speeds"])
        return cls(**fields)
