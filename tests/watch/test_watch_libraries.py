"""Libraries under a watch: none of them is told of it."""

import pytest

from .runs import SCRIPT, TORCHRUN, events, losses, plain, said, start, torchrun, watched

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


def test_accelerate():
    """Losses are the same bit by bit, and the slow rank is named."""
    done = watched(torchrun("accelerated"), SLOW="1")

    assert losses(done) == plain("accelerated", SLOW="1")
    assert "for rank 1 (" in said(done)[0]


DISPATCHES = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

class Rows(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(208, 4))

accelerator, models = Accelerator(cpu=True), [nn.Linear(4, 1), nn.Linear(4, 1)]
optimizers = [torch.optim.SGD(model.parameters()) for model in models]
loader = accelerator.prepare(DataLoader(Rows(), batch_size=8))
models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
for batch in loader:
    for model, optimizer in zip(models, optimizers):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
"""


def test_accelerate_reads_on_rank_0_for_all(tmp_path):
    """An `IterableDataset`, and two optimizers: all ranks count a step for each batch."""
    (tmp_path / "dispatches.py").write_text(DISPATCHES, encoding="utf-8")
    done = watched([*TORCHRUN, "2", tmp_path / "dispatches.py"], run_dir=tmp_path)
    measured = events(tmp_path, "StepMeasured")

    assert done.returncode == 0, done.stderr
    assert measured[-1]["step"] == 208 // (2 * 8) - 2
    assert {tuple(event["batch_size"]) for event in measured} == {(16, 16)}


def test_trainer(tmp_path):
    """Likewise, with checkpoints in between."""
    done = watched(torchrun("trainer", tmp_path / "a"), SLOW="1")

    assert losses(done) == plain("trainer", tmp_path / "b", SLOW="1")
    assert "for rank 1 (" in said(done)[0]


def test_lightning():
    """Likewise, also where Lightning starts the script again for the other ranks."""
    pytest.importorskip("lightning", reason="needs lightning")
    alone = losses(start([SCRIPT, "lightning"], SLOW="1"))
    for command in (torchrun("lightning"), [SCRIPT, "lightning"]):
        done = watched(command, SLOW="1")

        assert losses(done) == alone
        assert "for rank 1 (" in said(done)[0]
