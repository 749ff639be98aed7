"""One callback: Lightning's own loop, on global batches shared out by the ranks' speeds.

It hands Lightning a balanced training loader and a balanced model, at the place where Lightning is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, final

from torch.utils.data import DataLoader, IterableDataset

from ..exceptions import invalid
from ..torch import Balancer
from ..torch._exchange._crew import is_off
from ..torch._fabric import with_own_sampler
from ._library import callback_base, take_up_position, weigh_batch
from ._logged_means import LoggedMeans
from ._trainer_checks import averaged_model, check_options, check_trainer

_IS_OVER = "epoch_is_over"


@final
class FitLoader:
    """A balanced loader as Lightning's fit loop knows one.

    Lightning asks for the iterator before it gives the sampler the epoch; the order is drawn with
    the first batch. Lightning keeps the state in its own checkpoints, and loads it where an epoch
    continues. All else is the balanced loader's.

    Args:
        loader: balanced.
        stock: the ``DataLoader`` behind it.
        num_batches: returns Lightning's steps of an epoch, which may be fewer than the loader's.
    """

    def __init__(self, loader: Any, stock: Any, num_batches: Callable[[], float]) -> None:
        self._loader = loader
        self._stock = stock
        self._num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        """Return what the balanced loader has under ``name``, such as ``dataset``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def worker_init_fn(self) -> Any:
        """What loader workers run first; Lightning sets it for ``seed_everything``."""
        return self._stock.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._stock.worker_init_fn = function

    def __len__(self) -> int:
        """Return the global steps of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, and whether that is the end of Lightning's epoch."""
        state = self._loader.state_dict()
        return {**state, _IS_OVER: bool(state["steps_taken"] >= self._num_batches())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next loop continue from ``state``; with the next epoch, if Lightning's was over.

        Raises:
            ValueError: as for the balanced loader.
        """
        if not state.get(_IS_OVER):
            self._loader.load_state_dict(dict(state))


def drop_positions(checkpoint: Mapping[str, Any]) -> None:
    """Take the positions of balanced loaders out of a checkpoint, for loaders that have none."""
    loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if any(_IS_OVER in state for state in loops.get("combined_loader", ())):
        del loops["combined_loader"]


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
        """Balance the model, which Lightning has put into its DDP, or the script has sharded."""
        self._balancer.prepare(averaged_model(self._trainer.strategy))

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


_Callback: Any = callback_base()


@final
class BalanceCallback(_Callback):  # type: ignore[misc]  # of any kind, to mypy
    """Makes Lightning's ``Trainer`` share out its global batches by the speeds of the ranks.

    Usage:
        trainer = Trainer(strategy="ddp", callbacks=[BalanceCallback()])
        trainer.fit(model, datamodule=data)

    Every step of ``fit`` trains on the samples that it has in a plain ``Trainer`` with as many
    processes; ranks differ in how many of them they compute. The gradient is the mean over all of
    them. Validation within ``fit`` is shared out likewise, each sample once, in as many batches as
    plain Lightning makes. ``validate``, ``test`` and ``predict`` stay Lightning's own.

    With one process, or with ``EVENSTEP=off``, ``Trainer`` is left as it is.

    Lightning's checkpoints hold the loader's position and what was learnt about speeds, so that
    ``ckpt_path`` continues within an epoch.

    Args:
        stream: which rank reads what of a training ``IterableDataset``: ``"same"`` or
            ``"sharded"``, as in ``Balancer.prepare``.
        balancing: keywords for ``evenstep.torch.Balancer``: ``policy``, ``bounds``, ``unit``,
            ``runtime``, ``cost``.

    Attributes:
        balancer: of the fit under way, or of the last one; None before.

    Raises:
        ValueError: a setting is out of range, or Lightning decides it.
    """

    def __init__(
        self, *, stream: Literal["same", "sharded"] | None = None, **balancing: Any
    ) -> None:
        super().__init__()
        check_options(balancing)
        Balancer(**balancing)  # what is out of range is reported here
        self._stream = stream
        self._balancing = balancing
        self._logged = LoggedMeans()
        self._learnt: dict[str, Any] = {}
        self._fit: BalancedFit | None = None  # None where the trainer is left as it is
        self.balancer: Balancer | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin a run; Lightning asks for its loaders from here on."""
        if stage != "fit":
            return
        self.balancer = None
        check_trainer(trainer, pl_module)
        self.balancer = Balancer(**self._balancing)
        if is_off() or trainer.world_size == 1:
            self.balancer.prepare()  # which compares the ranks
            return
        if self._learnt:
            self.balancer.load_state_dict(self._learnt)
        self._fit = BalancedFit(trainer, self.balancer, self._logged, self._stream)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Balance the model."""
        if self._fit is not None:
            self._fit.prepare_model()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Have the loader continue where a checkpoint says."""
        if self._fit is not None:
            self._fit.restore_position()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Count the batch for what is logged of it."""
        if self._fit is not None:
            self._fit.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Reduce what was logged of the batch."""
        if self._fit is not None:
            self._fit.end_step()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Reduce what was logged of the batch."""
        if self._fit is not None:
            self._fit.end_step()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run on this rank."""
        if stage == "fit" and self.balancer is not None:
            self._end_fit()
            self.balancer.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run on this rank, and raise the loss of a worker if that is behind it."""
        if trainer.state.fn == "fit" and self.balancer is not None:
            self._end_fit()
            self.balancer.__exit__(type(exception), exception, exception.__traceback__)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Leave the loader's position to a loader that can take it up."""
        if self._fit is None:
            drop_positions(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt about speeds and memory; on rank 0, whose part Lightning saves."""
        if self._fit is None or self.balancer is None:
            return self._learnt
        return self.balancer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin with what an earlier run has learnt."""
        self._learnt = dict(state_dict)
        if self._fit is not None and self.balancer is not None:
            self.balancer.load_state_dict(self._learnt)

    def _end_fit(self) -> None:
        self._learnt = self.state_dict()
        if self._fit is not None:
            self._fit.end()
            self._fit = None
