"""The wrapped optimizer, stepping on this rank's ranges of the parameters alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from ._ownership import Ownership

State = dict[str, Any]


@final
class OwnedShards:
    """Shows an optimizer flat pieces of the parameters, in place, with their part of the state.

    Every parameter, or what this rank owns of it, stays a tensor of its own: weight decay, learning
    rates and counts of steps stay those of its group and its history, and one without a gradient is
    passed over.

    Args:
        wrapped: the optimizer; its groups hold pieces from now on.
        parameters: of all groups, one after the other.
        rank: of this process.
    """

    def __init__(
        self, wrapped: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], rank: int
    ) -> None:
        self._wrapped = wrapped
        self._parameters = parameters
        self.rank = rank
        sizes = [len(group["params"]) for group in wrapped.param_groups]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._members = [range(s, s + size) for s, size in zip(starts, sizes, strict=True)]
        self._pieces: dict[int, torch.Tensor] = {}
        self._layout: Ownership | None = None

    @property
    def layout(self) -> Ownership:
        """Who owns what."""
        assert self._layout is not None
        return self._layout

    @property
    def states(self) -> dict[int, State]:
        """This rank's part of the state, by parameter; tensors over elements are flat."""
        state = self._wrapped.state
        return {i: state[piece] for i, piece in self._pieces.items() if state.get(piece)}

    def adopt(self, layout: Ownership, states: Mapping[int, State]) -> None:
        """Own what ``layout`` says, with this state of it."""
        self._layout = layout
        own = [i for i in range(len(self._parameters)) if layout.owns(self.rank, i)]
        self._pieces = {i: self._parameters[i].detach().new_empty(0) for i in own}
        self._show([{**group} for group in self._wrapped.param_groups], states)
        self._bind()

    def forget(self, index: int) -> None:
        """Drop what there is of the state of a parameter."""
        if (piece := self._pieces.get(index)) is not None:
            self._wrapped.state.pop(piece, None)

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Step with the settings of ``groups``, on the ranges whose parameters have a gradient."""
        for mine, theirs in zip(self._wrapped.param_groups, groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        self._bind()
        try:
            if any(piece.grad is not None for piece in self._pieces.values()):
                self._wrapped.step()
        finally:
            for piece in self._pieces.values():
                piece.grad = None

    def load(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Load this rank's part of a saved state, and return the groups with its settings."""
        saved = state_dict["state"]
        groups, states = [], {}
        for group, members in zip(state_dict["param_groups"], self._members, strict=True):
            names = zip(group["params"], members, strict=True)
            mine = {name: index for name, index in names if index in self._pieces}
            groups.append({**group, "params": list(mine)})
            for name in mine.keys() & saved.keys():
                span = self.layout.span(self.rank, mine[name])
                states[name] = cut_state(saved[name], self._parameters[mine[name]], span)
        self._wrapped.load_state_dict({**state_dict, "state": states, "param_groups": groups})
        return self._wrapped.param_groups

    @contextmanager
    def whole(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[int, State]
    ) -> Iterator[torch.optim.Optimizer]:
        """Show the wrapped optimizer whole parameters and states meanwhile, and yield it."""
        states_before = self.states
        self._wrapped.param_groups = [{**group} for group in groups]
        by_parameter = {self._parameters[i]: state for i, state in states.items()}
        self._wrapped.state = defaultdict(dict, by_parameter)
        try:
            yield self._wrapped
        finally:
            self._show([{**group} for group in groups], states_before)

    def _show(self, groups: list[dict[str, Any]], states: Mapping[int, State]) -> None:
        for group, members in zip(groups, self._members, strict=True):
            group["params"] = [self._pieces[i] for i in members if i in self._pieces]
        self._wrapped.param_groups = groups
        mine = {self._pieces[i]: states[i] for i in states if i in self._pieces}
        self._wrapped.state = defaultdict(dict, mine)

    def _bind(self) -> None:
        """Have pieces lie where the parameters and gradients lie now."""
        for index, piece in self._pieces.items():
            parameter, span = self._parameters[index], self.layout.span(self.rank, index)
            # A scalar stays one: its state is of its shape.
            shape = (span.stop - span.start,) if parameter.dim() else ()
            piece.grad = None  # of the old type, it would forbid a new one
            piece.data = flat(parameter)[span].view(shape)
            if (gradient := parameter.grad) is not None:
                piece.grad = flat(_as_laid(gradient, parameter))[span].view(shape)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of memory: a view, without a graph."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def cut_state(state: State, parameter: torch.Tensor, span: slice) -> State:
    """Return a copy of what belongs to a span of the parameter."""
    return {
        key: _laid(value, parameter)[span].clone() if _is_spread(value) else copy_of(value)
        for key, value in state.items()
    }


def copy_of(value: Any, *, device: torch.device | None = None) -> Any:
    """Return a tensor of its own, as optimizers count in place; a plain value as it is."""
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _is_spread(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _laid(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``value`` flat, in the order in which ``parameter`` lies in memory."""
    laid = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
    return flat(laid.copy_(value))


def _as_laid(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
