"""Recurrent layers whose state comes from another batch: its rows are not those of their input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from ...exceptions import invalid


def watch_states(module: nn.Module) -> list[RemovableHandle]:
    """Have recurrent layers of ``module`` refuse a state with more or fewer rows than their input.

    A script that carries the state from batch to batch, as language models over columns of a text
    do, trains until a plan changes the sizes. torch then names shapes, and no remedy. Where the
    columns of a rank change, the size of at least one other rank changes as well, so the run ends
    before a state meets another column unnoticed.

    Args:
        module: one that is not compiled, as a hook may cost a compilation.
    """
    kinds = (nn.RNNBase, nn.RNNCellBase)
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    return [layer.register_forward_pre_hook(_check, with_kwargs=True) for layer in layers]


def _check(layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    values = dict(zip(("input", "hx"), inputs, strict=False)) | keywords
    state = values.get("hx")
    while isinstance(state, tuple | list) and state:  # of an LSTM: hidden and cell
        state = state[0]
    wanted = _rows_of(layer, values.get("input"))
    is_cell = isinstance(layer, nn.RNNCellBase)
    if wanted is None or not isinstance(state, torch.Tensor) or state.ndim != 3 - is_cell:
        return
    rows = state.shape[0 if is_cell else 1]
    if rows != wanted:
        raise invalid(
            f"{type(layer).__name__}.forward(hx=...)",
            f"have as many rows as its input, {wanted}",
            rows,
            "A state that is carried from batch to batch belongs to the rows of the last batch, "
            "and this plan gives the rank others. Keep the sizes, by `policy=Fixed((...))` and "
            "`DataLoader(drop_last=True)`, or begin every batch with a new state.",
        )


def _rows_of(layer: nn.Module, value: Any) -> int | None:
    """Return the rows of a batch; None where it has none, or is no tensor."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    is_cell = isinstance(layer, nn.RNNCellBase)
    if not isinstance(value, torch.Tensor) or value.ndim != 3 - is_cell:
        return None
    return int(value.shape[0 if is_cell or getattr(layer, "batch_first", False) else 1])
