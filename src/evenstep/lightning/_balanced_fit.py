"""One ``fit`` of a trainer on several ranks: its loaders and its model, balanced."""

from __future__ import annotations

from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from ..exceptions import invalid
from ..torch import Balancer
from ..torch._fabric import with_own_sampler
from ._fit_loader import FitLoader
from ._library import take_up_position, weigh_batch
from ._logged_means import LoggedMeans
from ._trainer_checks import check_ddp


@final
class BalancedFit:
    """Hands Lightning balanced loaders where it asks its strategy for them.

    Args:
        trainer: Lightning's, of which a fit begins.
        balancer: of this fit.
        logged: reduces what is logged.
        stream: as in ``Balancer.prepare``.
    """

    def __init__(self, trainer: Any, balancer: Balancer, logged: LoggedMeans, stream: Any) -> None:
        self._trainer = trainer
        self._balancer = balancer
        self._logged = logged
        self._stream = stream
        self._training: FitLoader | None = None
        self._shared: list[Any] = []  # loaders of validation
        # Asked for every loader, once the sampler is Lightning's and before anything is read.
        trainer.strategy.process_dataloader = self._prepared
        logged.begin(trainer.strategy, trainer.lightning_module, balancer, self._count)

    def prepare_model(self) -> None:
        """Balance the model, which Lightning has put into its DDP."""
        model = self._trainer.strategy.model
        check_ddp(model, self._trainer.strategy)
        self._balancer.prepare(model)

    def restore_position(self) -> None:
        """Have the loader take up the position in a checkpoint, if it has not yet.

        Lightning does so as it asks for the loader. A module that reads
        ``trainer.estimated_stepping_batches`` asks too early, before the checkpoint is read.
        """
        take_up_position(self._trainer)

    def begin_step(self) -> None:
        """Have a stand-in weigh nothing in the means of an epoch.

        Not for a stream, of which Lightning has read the next batch already.
        """
        if self._stream is None and not self._balancer.num_samples:
            weigh_batch(self._trainer, 0)

    def end_step(self) -> None:
        """Reduce what a batch of training or validation has logged."""
        self._logged.settle()

    def end(self) -> None:
        """Leave the strategy as it was."""
        vars(self._trainer.strategy).pop("process_dataloader", None)
        self._logged.end()

    def _count(self) -> float | None:
        """Return how many samples the batch in hand has; unshared validation counts the same."""
        if self._trainer.training:
            return None
        counts = [loader.count for loader in self._shared if loader.count is not None]
        return counts[0] if counts else 1

    def _prepared(self, loader: Any) -> Any:
        if self._trainer.training:
            return self._training_loader(loader)
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return loader  # which each rank reads by itself
        shared = self._balancer.prepare_eval(with_own_sampler(loader), lockstep="steps")
        self._shared.append(shared)
        return shared

    def _training_loader(self, loader: Any) -> FitLoader:
        if self._training is not None:
            raise invalid(
                "LightningModule.train_dataloader()",
                "be one `DataLoader`, as a step has one global batch",
                "several",
                "Join the data sets, by torch's `StackDataset` or `ConcatDataset`.",
            )
        stock = with_own_sampler(loader) if isinstance(loader, DataLoader) else loader
        balanced = self._balancer.prepare(stock, stream=self._stream)
        self._training = FitLoader(balanced, stock, lambda: self._trainer.num_training_batches)
        return self._training
