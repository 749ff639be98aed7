"""One callback: Lightning's own loop, on global batches shared out by the ranks' speeds.

It hands Lightning a balanced training loader and a balanced model, at the place where Lightning is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ..exceptions import invalid
from ..torch import Balancer
from ..torch._exchange._crew import is_off
from ..torch._fabric import with_own_sampler
from ..torch._model._sharded import fsdp_layers
from ._library import callback_base, hook_of, take_up_position, takes_loader, weigh_batch

_TUNERS = {"BatchSizeFinder", "LearningRateFinder"}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for settings of a balancer that Lightning decides.

    Raises:
        ValueError: there are some; the message says where they belong.
    """
    if getattr(options.get("runtime"), "process_group", None) is not None:
        rule, remedy = "leave out `Runtime(process_group=...)`", "Lightning trains on all ranks."
        raise invalid("BalanceCallback(runtime=...)", rule, "one", remedy)
    if options.get("network") is not None:
        rule = "be left out, as Lightning reduces the gradients"
        raise invalid(
            "BalanceCallback(network=...)",
            rule,
            options["network"],
            "Use `evenstep.torch` in a loop of your own.",
        )


def check_trainer(trainer: Any, module: Any) -> None:
    """Raise if the trainer is set up for what is not balanced.

    Raises:
        ValueError: it is; the message says what to do.
    """
    if not module.automatic_optimization:
        # The backward happens inside of the forward that is weighted, before its output is there.
        raise invalid(
            "LightningModule.automatic_optimization",
            "be True, so that the loss is weighted before its backward",
            False,
            "Return one loss from `training_step`, or use Fabric and `evenstep.torch`.",
        )
    if takes_loader(module.training_step):
        # The batch is taken inside of the forward: what is known then is the batch before.
        raise invalid(
            "LightningModule.training_step(dataloader_iter)",
            "take a batch, so that its size is known before the forward",
            "the loader's iterator",
            "Write `training_step(self, batch, batch_idx)`.",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise invalid(
            "Trainer(reload_dataloaders_every_n_epochs=...)",
            "be 0, as all loaders are prepared before the first step",
            trainer.reload_dataloaders_every_n_epochs,
            "Have the data set or the sampler change with `set_epoch`.",
        )
    kinds = {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}
    if tuners := sorted(kinds & _TUNERS):
        raise invalid(
            "Trainer(callbacks=...)",
            "have no tuner beside `BalanceCallback`, which counts the steps of one training",
            tuners[0],
            "Tune with a `Trainer` of its own, without `BalanceCallback`, before this one.",
        )


def averaged_model(strategy: Any) -> Any:
    """Return what averages gradients over the ranks: Lightning's DDP, or what FSDP2 shards.

    Raises:
        ValueError: nothing does, or not all of them.
    """
    module = strategy.model
    if isinstance(module, DistributedDataParallel):
        return module
    layers = fsdp_layers(module)
    if not layers:
        raise invalid(
            "Trainer(strategy=...)",
            "train with DDP or FSDP2",
            type(strategy).__name__,
            'Use `Trainer(strategy="ddp")`, or `ModelParallelStrategy()` and `fully_shard` in '
            "`configure_model`.",
        )
    sharded = set(layers[0].parameters())
    if layers[0] is module or any(p.requires_grad for p in set(module.parameters()) - sharded):
        raise invalid(
            "LightningModule.configure_model()",
            "shard one model of the module's, with all that is trained",
            "the module itself" if layers[0] is module else "a part of what is trained",
            "Write `fully_shard(self.model, mesh=self.device_mesh['data_parallel'])` after its "
            "layers.",
        )
    return layers[0]


_IN_A_BATCH = (  # in which something may be logged on a step
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "optimizer_step",
    "on_validation_batch_start",
    "validation_step",
)
_AT_ITS_END = ("on_train_batch_end", "on_validation_batch_end")  # before `settle` or after it
_NOT_SAID: Any = object()  # what is logged always says its group; others need their result now


@final
class LoggedMeans:
    """Stands in the place of a strategy's ``reduce`` and ``all_gather`` while a fit is balanced.

    Lightning's mean over ranks is right for equal counts only. A value logged on a step with
    ``sync_dist=True``, or in a hook around it, is the mean over the samples of all ranks here, and
    is reduced after the step's backward: a collective before it would make all ranks wait, and
    look equally fast. For a value of an epoch, Lightning divides the mean of sums by the mean of
    counts, which it rounds down to an integer; here that mean is exact.

    Lightning keeps what it is given to reduce with, and refuses another one in a later fit of the
    same trainer: so there is one of these for all fits.
    """

    def __init__(self) -> None:
        self._strategy: Any = None
        self._module: Any = None
        self._mean: Callable[[torch.Tensor], float] | None = None
        self._later: list[tuple[torch.Tensor, Any]] = []

    def begin(self, strategy: Any, module: Any, mean: Callable[[torch.Tensor], float]) -> None:
        """Stand in for ``strategy``, whose class continues to reduce.

        Args:
            strategy: of the trainer.
            module: logs.
            mean: returns the mean of a value of the batch in hand over the samples of all ranks.
        """
        self._strategy, self._module, self._mean = strategy, module, mean
        strategy.reduce, strategy.all_gather = self.reduce, self.all_gather

    def end(self) -> None:
        """Leave the strategy as it was."""
        for name in ("reduce", "all_gather"):
            vars(self._strategy).pop(name, None)
        self._module, self._mean, self._later = None, None, []

    def reduce(self, tensor: Any, group: Any = _NOT_SAID, reduce_op: Any = "mean") -> Any:
        """Return ``tensor`` reduced over ranks; of what a step logs, once ``settle`` is called."""
        if group is _NOT_SAID:  # as of `reduce_boolean_decision`, by which a step may be left out
            return self._plainly(tensor, None, reduce_op)
        if isinstance(tensor, torch.Tensor) and self._mean is not None:
            hook = hook_of(self._module)
            if group is None and not tensor.requires_grad:
                if hook in _IN_A_BATCH:
                    self._later.append((tensor, reduce_op))
                    return tensor
                if hook in _AT_ITS_END:
                    return self._reduced(tensor, reduce_op)
            if _is_mean(reduce_op) and not tensor.is_floating_point():
                tensor = tensor.double()
        return self._plainly(tensor, group, reduce_op)

    def settle(self) -> None:
        """Reduce what the batch has logged, in place. Collective."""
        later, self._later = self._later, []
        for tensor, reduce_op in later:
            self._reduced(tensor, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, which have to have one shape.

        Raises:
            ValueError: they have not, on every rank; torch would wait, or return garbage.
        """
        if isinstance(tensor, torch.Tensor) and tensor.ndim and dist.is_initialized():
            shapes: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(shapes, tuple(tensor.shape), group=group)
            if len(set(shapes)) > 1:
                raise invalid(
                    "LightningModule.all_gather(data)",
                    "have one shape on all ranks",
                    ", ".join(map(str, shapes)),
                    "Ranks have different numbers of samples: gather sums and counts, log with "
                    "`sync_dist=True`, or use torchmetrics.",
                )
        kind = type(self._strategy)
        return kind.all_gather(self._strategy, tensor, group=group, sync_grads=sync_grads)

    def _reduced(self, tensor: torch.Tensor, reduce_op: Any) -> torch.Tensor:
        if _is_mean(reduce_op) and self._mean is not None:
            return tensor.fill_(self._mean(tensor))
        return tensor.copy_(self._plainly(tensor.clone(), None, reduce_op))

    def _plainly(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        kind = type(self._strategy)
        return kind.reduce(self._strategy, tensor, group=group, reduce_op=reduce_op)


def _is_mean(reduce_op: Any) -> bool:
    return isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")


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
        self._balanced: Balancer | None = None  # of a fit; None where the trainer is left as it is
        self._training: FitLoader | None = None
        self._shared: list[Any] = []  # loaders of validation
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
        self._balanced, self._training, self._shared = self.balancer, None, []
        # Asked for every loader, once the sampler is Lightning's and before anything is read.
        trainer.strategy.process_dataloader = partial(self._prepared, trainer)
        self._logged.begin(trainer.strategy, pl_module, partial(self._mean, trainer))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Balance the model, which Lightning has put into its DDP, or the script has sharded."""
        if self._balanced is not None:
            self._balanced.prepare(averaged_model(trainer.strategy))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Have the loader take up the position in a checkpoint, if it has not yet.

        Lightning does so as it asks for the loader. A module that reads
        ``trainer.estimated_stepping_batches`` asks too early, before the checkpoint is read.
        """
        if self._balanced is not None:
            take_up_position(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Have a stand-in weigh nothing in the means of an epoch.

        Not for a stream, of which Lightning has read the next batch already.
        """
        balanced = self._balanced
        if balanced is not None and self._stream is None and not balanced.num_samples:
            weigh_batch(trainer, 0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Reduce what was logged of the batch."""
        self._logged.settle()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Reduce what was logged of the batch."""
        self._logged.settle()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run on this rank."""
        if stage == "fit" and self.balancer is not None:
            self._end_fit(trainer)
            self.balancer.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run on this rank, and raise the loss of a worker if that is behind it."""
        if trainer.state.fn == "fit" and self.balancer is not None:
            self._end_fit(trainer)
            self.balancer.__exit__(type(exception), exception, exception.__traceback__)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Leave the loader's position to a loader that can take it up."""
        if self._balanced is None:
            drop_positions(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt about speeds and memory; on rank 0, whose part Lightning saves."""
        return self._learnt if self._balanced is None else self._balanced.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin with what an earlier run has learnt."""
        self._learnt = dict(state_dict)
        if self._balanced is not None:
            self._balanced.load_state_dict(self._learnt)

    def _end_fit(self, trainer: Any) -> None:
        self._learnt = self.state_dict()
        if self._balanced is not None:
            self._balanced = None
            vars(trainer.strategy).pop("process_dataloader", None)
            self._logged.end()

    def _mean(self, trainer: Any, value: torch.Tensor) -> float:
        """Return a mean over the samples of the batch in hand; unshared ones count the same."""
        assert self._balanced is not None, "a fit is under way"
        if trainer.training:
            return self._balanced.mean(value)
        counts = [loader.count for loader in self._shared if loader.count is not None]
        return self._balanced.mean(value, counts[0] if counts else 1)

    def _prepared(self, trainer: Any, loader: Any) -> Any:
        """Return a loader as Lightning is to have it."""
        assert self._balanced is not None, "a fit is under way"
        is_stock = isinstance(loader, DataLoader)
        if not trainer.training:
            if not is_stock or isinstance(loader.dataset, IterableDataset):
                return loader  # which each rank reads by itself
            shared = self._balanced.prepare_eval(with_own_sampler(loader), lockstep="steps")
            self._shared.append(shared)
            return shared
        if self._training is not None:
            raise invalid(
                "LightningModule.train_dataloader()",
                "be one `DataLoader`, as a step has one global batch",
                "several",
                "Join the data sets, by torch's `StackDataset` or `ConcatDataset`.",
            )
        stock = with_own_sampler(loader) if is_stock else loader
        balanced = self._balanced.prepare(stock, stream=self._stream)
        self._training = FitLoader(balanced, stock, lambda: trainer.num_training_batches)
        return self._training
