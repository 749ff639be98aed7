"""TensorBoard reads back what the hook has written."""

import pytest

from evenstep.export import TensorBoard

from .steps import measured, shown


@pytest.mark.slow  # where TensorFlow is installed, TensorBoard imports it
def test_tensorboard_reads_the_charts_back(tmp_path):
    """From torch's own writer, at the steps that they were; many ranks as quantiles."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    steps = [
        measured(step, (8,) * 100, tuple(0.1 + rank / 100 for rank in range(100)))
        for step in range(25)
    ]
    with SummaryWriter(tmp_path) as writer:
        shown(TensorBoard(writer), steps)
    read = EventAccumulator(str(tmp_path)).Reload()
    tags = read.Tags()["scalars"]

    slowest = [(one.step, one.value) for one in read.Scalars("evenstep/step.makespan_s")]
    assert slowest == [(step, pytest.approx(1.09)) for step in (0, 10, 20)]
    (middle, *_) = read.Scalars("evenstep/ranks.compute_s/0.5")
    assert middle.value == pytest.approx(0.6, abs=0.02)
    assert sum(tag.startswith("evenstep/rank.compute_s/") for tag in tags) == 8
