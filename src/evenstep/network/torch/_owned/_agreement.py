"""All ranks say what they are about to do, before any of them does it."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, final

import torch

from ._carrier import Carrier

Act = Literal["step", "replan", "gather"]
_ACTS: dict[Act, int] = {"step": 0, "replan": 1, "gather": 2}
_PLAIN = (bool, int, float, str, type(None))
_UNLIKE = {
    "act": "another method was called: step, replan and ask for the state on all ranks alike",
    "model": "there are other parameters: make the same optimizer on all ranks",
    "epoch": "an older plan is in force: call `replan` with the same split on all ranks",
    "split": "another split of this epoch is in force: decide it on one rank for all",
    "new_split": "another split was given: decide it on one rank for all",
    "begun": "other parameters have a state: load the same state on all ranks",
    "given": "other parameters have a gradient: reduce gradients on all ranks before the step",
    "settings": "`param_groups` has other settings: change them on all ranks alike",
}


@final
@dataclass(frozen=True, slots=True)
class Stamp:
    """What has to be the same on all ranks, as integers.

    Attributes:
        act: what is about to be done.
        model: digest of the parameters.
        epoch: of the plan in force.
        split: digest of it.
        new_split: digest of the one to come.
        begun: digest of which parameters have a state.
        given: digest of which have a gradient.
        settings: digest of the groups' settings.
    """

    act: int
    model: int
    epoch: int
    split: int
    new_split: int
    begun: int
    given: int
    settings: int


def act_number(act: Act) -> int:
    """Return the number of an act."""
    return _ACTS[act]


def agree(stamp: Stamp, carrier: Carrier, ranks: Sequence[int]) -> None:
    """Return if all ranks have the same stamp. Collective.

    All of them see all stamps, so that they raise together and nothing is under way.

    Args:
        stamp: of this rank.
        carrier: to the others.
        ranks: global ranks of the carrier's.

    Raises:
        RuntimeError: one is another; the message names the ranks that are alone with theirs.
        WorkerLostError: a rank was lost.
    """
    names = [each.name for each in fields(Stamp)]
    mine = torch.tensor([getattr(stamp, name) for name in names])
    with carrier.in_exchange():
        told = torch.stack(carrier.tell(mine)).tolist()
    for name, column in zip(names, zip(*told, strict=True), strict=True):
        if len(set(column)) > 1:
            odd = _odd(column, latest=name == "epoch")
            which = ", ".join(str(ranks[rank]) for rank in odd)
            raise RuntimeError(
                f"On rank {which}, {_UNLIKE[name]}. This call of `ShardedOptimizer` did nothing."
            )


def digest(values: Iterable[Any]) -> int:
    """Return a number that other values hardly have."""
    return zlib.crc32(repr(list(values)).encode())


def settings_of(groups: Iterable[Mapping[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Return the plain settings of groups, tensors of one element among them."""
    return [
        [(key, plain) for key, value in sorted(group.items()) for plain in _plain(key, value)]
        for group in groups
    ]


def _plain(key: str, value: Any) -> list[Any]:
    if key in ("params", "param_names"):
        return []
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return [value.item()]
    items = value if isinstance(value, (list, tuple)) else (value,)
    if all(isinstance(item, torch.Tensor) and item.numel() == 1 for item in items):
        return [[item.item() for item in items]]
    return [value] if all(isinstance(item, _PLAIN) for item in items) else []


def _odd(column: Sequence[int], *, latest: bool) -> list[int]:
    """Return who has another value than most, or, of two, than the lower rank.

    Of plans, who has not the latest one.
    """
    most = max(column) if latest else Counter(column).most_common(1)[0][0]
    return [rank for rank, value in enumerate(column) if value != most]
