"""One callback: Lightning's own loop, on global batches shared out by the ranks' speeds."""

from __future__ import annotations

from typing import Any, Literal, final

from ..torch import Balancer
from ..torch._exchange._environment import is_off
from ._balanced_fit import BalancedFit
from ._fit_loader import drop_positions
from ._library import callback_base
from ._logged_means import LoggedMeans
from ._trainer_checks import check_options, check_trainer

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
        Balancer(**balancing)  # what is out of range is told here
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
        """Have the loader go on where a checkpoint says."""
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
