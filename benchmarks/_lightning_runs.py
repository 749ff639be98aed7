"""Lightning's Trainer on a few workers: a small model slowed down, and Lightning's own example."""

from __future__ import annotations

import os
import tempfile
import warnings
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter, sleep
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._published_stubs import put
from evenstep.lightning import BalanceCallback
from evenstep.torch import Runtime

BATCH_SIZE = 14  # three workers make 42: speeds 1 : 2 : 4 divide it
EXAMPLE = "pytorch-lightning/examples/pytorch/basics/transformer.py"
LINES = {
    "\nimport lightning as L\n": (
        "\nimport lightning as L\nfrom evenstep.lightning import BalanceCallback\n"
    ),
    "max_epochs=20)": "max_epochs=20, callbacks=[BalanceCallback()])",
}
_UNEVEN = "BalanceCallback(policy=__import__('evenstep').policies.Fixed((30, 10)))"


def balanced_text(text: str) -> str:
    """Return Lightning's example with the callback, as docs/recipes/lightning.md has it."""
    for before, after in LINES.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


class Slowed(lightning.LightningModule):
    """Sleeps for each row, half in the forward and half in the backward."""

    def __init__(self, slope_s: float, *, logs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.slope_s, self.logs, self.num_rows = slope_s, logs, 0
        self.marks: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss, logged over ranks if asked for."""
        (x,) = batch
        self.num_rows = len(x)
        sleep(self.slope_s * self.num_rows / 2)
        loss: torch.Tensor = self.net(x).square().mean()
        if self.logs:
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        """Sleep, and go backward."""
        sleep(self.slope_s * self.num_rows / 2)
        loss.backward()

    def on_train_batch_start(self, *_: Any) -> None:
        """Note when."""
        self.marks.append(perf_counter())

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seconds(
    rank: int, slopes_s: list[float], num_steps: int, logs: bool, num_accumulated: int
) -> tuple[list[float], tuple[int, ...]]:
    """Return seconds of every batch in a balanced fit, and the last sizes."""
    callback = BalanceCallback(runtime=Runtime(line_every=None))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=len(slopes_s),
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=num_accumulated,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(num_steps * BATCH_SIZE * len(slopes_s), 16))
    module = Slowed(slopes_s[rank], logs=logs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data, batch_size=BATCH_SIZE))
    assert callback.balancer is not None
    taken = [after - before for before, after in pairwise(module.marks)]
    return taken, callback.balancer.batch_sizes


def middle(taken: list[float]) -> float:
    """Return the median of steps after those in which speeds are learnt."""
    return median(taken[5:])


def example(rank: int, text: str, balanced: bool) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return where Lightning's example ends on two ranks in double precision, and the last sizes.

    The words are random, epochs are two, and evaluations have two batches. There is no dropout: it
    would draw numbers of the rank's own, which depend on the split.
    """
    import lightning.pytorch.demos as demos

    put(["wikitext"])
    demos.Transformer = partial(demos.Transformer, dropout=0.0)  # type: ignore[misc, assignment]
    settings = {"ACCELERATOR": "cpu", "STRATEGY": "ddp", "DEVICES": "2", "PRECISION": "64-true"}
    settings |= {"LIMIT_VAL_BATCHES": "2", "LIMIT_TEST_BATCHES": "2"}
    os.environ.update({f"PL_TRAINER_{name}": value for name, value in settings.items()})
    fitted: list[Any] = []

    class Trainer(lightning.Trainer):  # whose name is that of the settings
        def fit(self, model: Any, *args: Any, **kwargs: Any) -> None:
            fitted.append((model, self.callbacks))
            super().fit(model, *args, **kwargs)

    lightning.Trainer = Trainer  # type: ignore[misc]
    if balanced:
        text = balanced_text(text).replace("BalanceCallback()", _UNEVEN)
    text = text.replace("max_epochs=20", "max_epochs=2")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        exec(compile(text, EXAMPLE, "exec"), {"__name__": "__main__"})
        os.chdir("/")
    ((model, callbacks),) = fitted
    sizes = [each.balancer.batch_sizes for each in callbacks if isinstance(each, BalanceCallback)]
    ends = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    return ends, sizes[0] if sizes else ()
