"""An optimizer whose state lies with the owners of ranges of the parameters: the public class."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_not
from typing import Any, NoReturn, final, overload

import numpy as np
import torch
import torch.distributed as dist

from ....exceptions import invalid
from ..._plans._split import Split
from .._reduce._traffic import LinkTraffic
from ._agreement import Act, Stamp, act_number, agree, digest, settings_of
from ._carrier import Carrier, Parcel
from ._joining import join, ranks_of
from ._kinds import check_gradients, check_optimizer, check_parameters
from ._ownership import Ownership
from ._shards import OwnedShards, cut_state, flat
from ._states import check_saved, gather, move


@final
class ShardedOptimizer(torch.optim.Optimizer):
    r"""Keeps an optimizer's state at the owners of ranges of the parameters, of any sizes.

    Rank i owns the share $w_i$ of all parameters: it alone keeps what the optimizer remembers of
    them, steps on them, and sends the result to the others. With $P$ bytes of parameters and $k$
    times as many of state, a rank keeps $k w_i P$ bytes instead of $k P$; for every step it sends
    $(N - 1) w_i P$ bytes and receives $(1 - w_i) P$, besides what reducing the gradients takes.

    Gradients have to be whole and the same on all ranks, as DDP leaves them; clip and unscale them
    as ever. Then a step changes the parameters as the wrapped optimizer would, bit for bit, under
    any split and any sequence of them. Ranges begin at multiples of 64 elements of a parameter, so
    that vector instructions end where they would; it is different for parameters of 16 bits on a
    CPU with several threads, whose own steps depend on the number of threads, and where owners are
    machines that round unlike. All ranks have the owner's numbers in any case.

    Right where the state does not fit, or fits on some ranks only: AdamW's is twice the parameters.
    Wrong where it fits everywhere: a step moves half as many bytes again, and waits for them. Not
    for FSDP, which shards its own, nor for ranks that hold no model.

    Use it in the place of the optimizer: schedulers, gradient scalers, ``Checkpoint`` and edits of
    ``param_groups`` take it. ``step``, ``replan`` and ``state_dict`` are collective: all ranks call
    them, in the same order. ``state`` tells which parameters have some, not what it is.

    Usage:
        optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), split)

    Args:
        optimizer: one of torch's that look at each element by itself: SGD, Adam, AdamW, RMSprop,
            Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop. Not used by itself any more: it
            holds pieces from now on. State that it has already is kept.
        split: how much each rank owns; its ``chunk_bytes`` is the size of a message. None is equal
            shares.
        process_group: the ranks that train the same model, as given to DDP; None is all.
        timeout_s: how long a rank may keep the others waiting, positive.
        element_wise: whether to take an optimizer of another class. Say so only if every element's
            next value depends on its own gradient, its own state and counts alone.

    Raises:
        ValueError: the optimizer is none of these, it or a parameter cannot be cut, or ``split`` is
            for another number of ranks.
    """

    _is_made = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        split: Split | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 1800.0,
        element_wise: bool = False,
    ) -> None:
        check_optimizer(optimizer, element_wise=element_wise)
        if not timeout_s > 0:
            raise invalid("ShardedOptimizer(timeout_s=...)", "be positive", timeout_s, "Use 1800.")
        groups = [{**group} for group in optimizer.param_groups]
        super().__init__(groups, optimizer.defaults)
        self._is_made = True
        self._parameters = [each for group in self.param_groups for each in group["params"]]
        check_parameters(self._parameters)
        self._ranks, rank = ranks_of(process_group)
        self._had_group = dist.is_available() and dist.is_initialized()
        self._timeout_s = timeout_s
        self._carrier: Carrier | None = None
        shares = np.full(len(self._ranks), 1 / len(self._ranks))
        split = Split.of(shares) if split is None else split
        self._check_size("ShardedOptimizer(split)", split)
        self._shards = OwnedShards(optimizer, self._parameters, rank)
        self._model = digest((p.shape, p.dtype, p.stride()) for p in self._parameters)
        begun = {i: state for i, p in enumerate(self._parameters) if (state := optimizer.state[p])}
        layout = Ownership.of(self._parameters, split)
        states = {
            i: cut_state(state, self._parameters[i], layout.span(rank, i))
            for i, state in begun.items()
            if layout.owns(rank, i)
        }
        self._shards.adopt(layout, states)
        self.state = _marks(self._parameters[i] for i in begun)

    @property
    def split(self) -> Split:
        """Who owns how much."""
        return self._shards.layout.split

    @property
    def traffic(self) -> LinkTraffic:
        """Parameters and state that went over this rank's links so far."""
        return LinkTraffic(0, 0) if self._carrier is None else self._carrier.traffic

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step on what this rank owns, and get the others' results. Collective.

        Parameters without a gradient are passed over, as torch does.

        Args:
            closure: computes the loss and the gradients anew; called once, before.

        Raises:
            WorkerLostError: a rank was lost; parameters may be half old, half new: load the last
                checkpoint.
            RuntimeError: ranks are not at the same step, plan, settings or gradients.
            TypeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [i for i, each in enumerate(self._parameters) if each.grad is not None]
        check_gradients(self._parameters)
        with self._together("step", given=given) as carrier:
            self._shards.step(self.param_groups)
            if carrier is not None:
                self._pull(carrier, given)
        self.state.update(_marks(self._parameters[i] for i in given))
        # What was saved for a backward is old now, also where others wrote, or a piece did.
        torch.autograd.graph.increment_version([self._parameters[i] for i in given])
        return loss

    def replan(self, split: Split) -> None:
        """Own by ``split`` from now on. Collective, with the same one on all ranks.

        Only state of ranges that change their owner travels. Parameters are on all ranks anyway.

        Args:
            split: of a later epoch than the one in force, or that very one again.

        Raises:
            ValueError: it is of another number of ranks, or no later.
            RuntimeError: ranks were given different ones, or are at different steps.
            WorkerLostError: a rank was lost.
        """
        name = "ShardedOptimizer.replan(split)"
        self._check_size(name, split)
        if split.epoch <= self.split.epoch and split != self.split:
            rule = f"be of a later epoch than {self.split.epoch}, which is in force"
            raise invalid(name, rule, split, "Number plans upwards.")
        with self._together("replan", new_split=split) as carrier:
            if split == self.split:
                return
            new = Ownership.of(self._parameters, split)
            states = self._shards.states
            if carrier is not None:
                states = move(self._parameters, self._shards, new, carrier)
            self._shards.adopt(new, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as the wrapped optimizer would have it. Collective.

        Every rank gets all of it, in the host's memory. It loads into that optimizer without this
        class, and into this one under any split, on any number of ranks.

        Raises:
            WorkerLostError: a rank was lost.
            RuntimeError: ranks are at different steps.
        """
        with self._together("gather") as carrier:
            states = gather(self._parameters, self._shards, carrier)
            with self._shards.whole(self.param_groups, states) as wrapped:
                return wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a whole state, of this class or of the wrapped one. The same on all ranks.

        Nothing travels: each rank keeps its part.

        Raises:
            ValueError: it is of other groups or of parameters of other shapes.
        """
        names = check_saved(state_dict, self.param_groups)
        loaded = self._shards.load(state_dict)
        self.param_groups = [
            {**new, "params": old["params"]}
            for new, old in zip(loaded, self.param_groups, strict=True)
        ]
        self.state = _marks(each for name, each in names if name in state_dict["state"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse it: who owns what was decided for the parameters there are.

        Raises:
            ValueError: always, once this is made.
        """
        if self._is_made:
            rule = "be called before it is sharded"
            remedy = "Give all groups to the optimizer first, and freeze what is to wait."
            raise invalid("ShardedOptimizer.add_param_group(...)", rule, "a new group", remedy)
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled: a copy would lack its part in the exchange."""
        raise TypeError(
            "`ShardedOptimizer` cannot be copied or pickled. Save its `state_dict()`, and wrap "
            "another optimizer."
        )

    def _pull(self, carrier: Carrier, given: Sequence[int]) -> None:
        layout, parts = self._shards.layout, {i: flat(self._parameters[i]) for i in given}
        owned = [
            [part[layout.span(rank, i)] for i, part in parts.items()]
            for rank in range(len(self._ranks))
        ]
        arrivals = {peer: owned[peer] for peer in carrier.peers}
        parcel = Parcel(owned[self._shards.rank], carrier.peers)
        carrier.carry([parcel], arrivals, chunk_bytes=self.split.chunk_bytes)

    def _together(
        self, act: Act, *, given: Sequence[int] = (), new_split: Split | None = None
    ) -> AbstractContextManager[Carrier | None]:
        """Return what goes around something that all ranks do, once they are known to."""
        self._check_parameters()
        begun = [i for i, each in enumerate(self._parameters) if each in self.state]
        for index in set(range(len(self._parameters))) - set(begun):
            self._shards.forget(index)  # its user cleared `state`
        if len(self._ranks) == 1:
            return nullcontext()
        stamp = Stamp(
            act=act_number(act),
            model=self._model,
            epoch=self.split.epoch,
            split=digest([self.split]),
            new_split=digest([new_split]),
            begun=digest(begun),
            given=digest(given),
            settings=digest(settings_of(self.param_groups)),
        )
        if self._carrier is None:
            self._carrier = join(self._ranks, timeout_s=self._timeout_s)
            weakref.finalize(self, self._carrier.close)
        self._carrier.check()
        agree(stamp, self._carrier, self._ranks)
        return self._carrier.in_exchange()

    def _check_size(self, name: str, split: Split) -> None:
        if split.world_size != len(self._ranks):
            rule = f"have a part for each of {len(self._ranks)} ranks"
            remedy = "Count the ranks that train the model, and no others."
            raise invalid(name, rule, f"{split.world_size} parts", remedy)

    def _check_parameters(self) -> None:
        now = [each for group in self.param_groups for each in group["params"]]
        if len(now) != len(self._parameters) or any(map(is_not, now, self._parameters)):
            raise RuntimeError(
                "`ShardedOptimizer.param_groups` holds other parameters than it was made with. "
                "Freeze parameters by `requires_grad_(False)`, or make a new one."
            )
        if not self._had_group and dist.is_available() and dist.is_initialized():
            raise RuntimeError(
                "`ShardedOptimizer` was made before there was a process group, and owns "
                "everything. Make it after `init_process_group`."
            )


def _marks(parameters: Iterable[torch.Tensor]) -> Any:
    """Return what ``state`` shows. No defaultdict: what is asked for must not seem to be there."""
    return {each: {} for each in parameters}
