"""Evaluation shared out over the ranks by their speeds: each sample once, none repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from ...._diagnosis import Phase
from ...._planner import Cost
from ...._types import IntArray
from ....exceptions import invalid
from .._protocols import Collectives, LoaderSession
from ..deal._plans import forwards, forwards_by_cost, forwards_of_steps
from ..fetch._loader_workers import with_parts
from ..order._drawing import pass_epoch
from ..order._global_order import GlobalOrder
from ._base import AbstractLoader

Lockstep = bool | Literal["steps"]
"""Whether all ranks make as many forwards; "steps" is one for each batch of a plain evaluation."""


class EvalLoader(AbstractLoader):
    r"""Hands out this rank's part of an evaluation, and gives exact means over all of it.

    Of $N$ samples rank $r$ gets $n_r \propto b_r$, with $b$ the local batch sizes of the newest
    step that was trained on (equal ones before the first), so that ranks which trained a step in
    the same time evaluate in the same time. Each sample is evaluated once over all ranks. Nothing
    is padded or repeated; torch's ``DistributedSampler`` does that. A rank's samples are spread
    over the whole data set, and come in batches of at most the loader's ``batch_size``.

    Right for means over samples. Ranks get different numbers of batches, of different sizes, and
    with a short data set perhaps none, so the loop must not contain collectives. If a forward
    itself is a collective, ranks run in lockstep: they make the same number of forwards, and a
    rank without a sample for one gets a stand-in, whose ``count`` is 0. In lockstep by steps, every
    rank makes one forward for each batch of a plain evaluation: of as many samples as its speed
    asks for, and at least one. Then collectives may follow each forward.

    Usage:
        validation = balancer.prepare_eval(DataLoader(held_out, batch_size=64))
        with torch.no_grad():
            for x, y in validation:
                validation.add("loss", loss_fn(model(x), y))
        print(validation.mean()["loss"])

    Args:
        loader: the user's own, over a data set with a length; its workers and ``collate_fn`` are
            kept, and a sampler that draws runs on rank 0 for all.
        ranks: that share it.
        session: knows the plan in use, and reports a step under way before a collective.
        lockstep: returns whether ranks go in lockstep, at the start of an evaluation.
        cost: of its samples, by which they are shared out then; None counts them.

    Attributes:
        count: samples of the batch in hand that count; 0 for a stand-in, None outside a loop.

    Raises:
        ValueError: the loader cannot be shared out; the message names the remedy.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        ranks: Collectives,
        session: LoaderSession,
        lockstep: Callable[[], Lockstep],
        cost: Cost | None = None,
    ) -> None:
        _check(loader, cost)
        self._loader = loader
        self._ranks = ranks
        self._session = session
        self._lockstep = lockstep
        self._costs = None if cost is None else cost.table(loader.dataset)
        # Not by a method: within a cycle of references, workers that persist end after 5 s each.
        self._order = GlobalOrder(loader, ranks, partial(_share, ranks))
        self._batches: list[list[int]] = []  # a batch sampler: of the newest evaluation
        self._inner = with_parts(loader, batch_sampler=self._batches)
        self._sums: dict[str, tuple[Any, float]] = {}
        self.count: int | None = None
        if lockstep() == "steps" and 0 < self.num_samples < ranks.world_size:
            raise invalid(
                'Balancer.prepare_eval(lockstep="steps")',
                f"have a sample for each of {ranks.world_size} ranks",
                self.num_samples,
                "Evaluate more samples, or leave this loader as it is.",
            )

    @property
    def num_samples(self) -> int:
        """Samples of an evaluation over all ranks."""
        return self._order.num_samples

    def __len__(self) -> int:
        """Return the number of batches that this rank would get now; newer plans may change it."""
        return len(self._forwards(np.arange(self.num_samples)))

    def __iter__(self) -> Iterator[Any]:
        with self._session.steps.timed(Phase.EVALUATION):
            order = self._draw()
            mine = self._forwards(order)
            self._sums = {}
            self._batches[:] = [order[places if len(places) else [0]].tolist() for places in mine]
            try:
                for batch, places in zip(self._inner, mine, strict=True):
                    self.count = len(places)
                    yield batch
            finally:
                self.count = None

    def add(self, name: str, value: float | torch.Tensor, *, count: float | None = None) -> None:
        """Add the current batch to the mean of ``name``; does not wait for ranks or devices.

        Args:
            name: the name of the mean.
            value: the mean over the batch: a number, or a tensor of one element.
            count: the number of items that it is a mean over, at least 0, if these are not samples
                but, for example, valid targets. None takes the batch's samples. With 0 the value is
                left out.

        Raises:
            RuntimeError: outside of a loop over this loader, without ``count``.
            ValueError: ``value`` has several elements, or ``count`` is negative.
        """
        if count is None:
            count = self.count
        if count is None:
            raise RuntimeError(
                "No batch of this loader is in hand, so the number of samples behind the value is "
                "not known. Add inside `for batch in loader`, or give `add(..., count=...)`."
            )
        if not 0 <= count < math.inf:
            raise invalid("EvalLoader.add(count=...)", "be at least 0", count, "Count samples.")
        if self.count == 0 or not count:  # a stand-in was evaluated by its owner
            return
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise invalid(
                    "EvalLoader.add(value=...)",
                    "be one number, the mean over the batch",
                    f"a tensor of shape {tuple(value.shape)}",
                    "Reduce it with `.mean()`.",
                )
            value = value.detach().reshape(())
            value = value if value.device.type == "mps" else value.double()
        total, seen = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = total + value * count, seen + count

    def mean(self) -> dict[str, float]:
        """Return the mean of everything added since the last loop began, over all ranks.

        Exact for any split: sums and counts are in double precision and added in the order of the
        ranks, so every rank has the same number. Collective.
        """
        self._session.steps.report_now()
        mine = {name: (float(total), float(seen)) for name, (total, seen) in self._sums.items()}
        with self._session.steps.timed(Phase.MEAN):
            rows = self._ranks.collect(mine)
        means = {}
        for name in sorted({name for sums in rows for name in sums}):
            totals, counts = zip(*(sums[name] for sums in rows if name in sums), strict=True)
            means[name] = math.fsum(totals) / math.fsum(counts)
        return means

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on to the sampler if it wants to know."""
        pass_epoch(self._loader.sampler, epoch)

    def _forwards(self, order: IntArray) -> list[IntArray]:
        """Return the places of what this rank evaluates, forward by forward."""
        plan = self._session.steps.plan_in_use  # a thread may fetch steps that others have not
        rank, world_size, size = self._ranks.rank, self._ranks.world_size, self._loader.batch_size
        assert size is not None
        lockstep = world_size > 1 and self._lockstep()
        if self._costs is not None:
            return forwards_by_cost(
                rank,
                order,
                self._costs,
                None if plan is None else plan.costs,
                world_size=world_size,
                batch_size=size,
                lockstep=bool(lockstep),
            )
        weights = plan.batch_size if plan is not None else (1,) * world_size
        if lockstep == "steps":
            return forwards_of_steps(rank, self.num_samples, weights, step_size=size * world_size)
        return forwards(rank, self.num_samples, weights, batch_size=size, lockstep=lockstep)

    def _draw(self) -> IntArray:
        """Return the order. Only a sampler that draws has to be agreed on, by a broadcast."""
        if type(self._loader.sampler) is SequentialSampler:
            return np.arange(self.num_samples)
        self._session.steps.report_now()
        return self._order.whole()


def _share(ranks: Collectives, key: tuple[int, int], ints: IntArray | None) -> IntArray:
    """Share integers by a collective: the loop begins as one."""
    listed = None if ints is None else ints.tolist()
    return np.array(ranks.share_indices(listed), np.int64)


def _check(loader: Any, cost: Cost | None) -> None:
    """Raise for what an evaluation cannot honour; ``GlobalOrder`` refuses more."""
    if not isinstance(loader, DataLoader):
        raise invalid(
            "Balancer.prepare_eval(loader)",
            "be a torch `DataLoader`",
            type(loader).__name__,
            "Pass the loader itself, one a call.",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise invalid(
            "Balancer.prepare_eval(loader)",
            "have a data set that is addressed by index",
            f"the IterableDataset {type(loader.dataset).__name__}",
            "Leave the loader as it is, have each rank read its own part, and take the mean with "
            "`balancer.mean(value, count=...)`.",
        )
    if loader.drop_last:
        raise invalid(
            "Balancer.prepare_eval(loader)",
            "evaluate every sample",
            "`DataLoader(drop_last=True)`",
            "Set `drop_last=False`; sizes of batches follow from the speeds of the ranks.",
        )
    if cost is not None and cost.from_batch is not None:
        raise invalid(
            "Balancer.prepare_eval(cost=...)",
            "be known before an evaluation, which is shared out as a whole",
            cost,
            "Give lengths by index or the name of a column, or leave `cost` out.",
        )
