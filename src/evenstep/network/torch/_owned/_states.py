"""The optimizer's state on its way: gathered whole, cut into ranges, moved to new owners."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from ....exceptions import invalid
from ._carrier import Carrier, Parcel
from ._ownership import Ownership, common
from ._shards import OwnedShards, State, copy_of, flat


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """A part of the state with a value for every element.

    Attributes:
        dtype: of its values.
        device: kind of device on which they are.
    """

    dtype: torch.dtype
    device: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class Single:
    """A part of the state that is one and the same for all elements, such as a count of steps.

    Attributes:
        value: a tensor on the host, or a plain value.
        device: kind of device on which the tensor was; None of a plain value.
    """

    value: Any
    device: str | None


Entries = dict[int, dict[str, Spread | Single]]


def check_saved(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[tuple[Any, torch.Tensor]]:
    """Return the names that a saved state has for the parameters, if it is of these groups.

    Raises:
        ValueError: it is of other groups, or a tensor is neither for every element of its parameter
            nor for all at once.
    """
    name = "ShardedOptimizer.load_state_dict(...)"
    remedy = "Load what was saved of this model, with the same groups."
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != saved_sizes:
        rule = f"be of groups of {sizes} parameters"
        raise invalid(name, rule, f"groups of {saved_sizes}", remedy)
    saved = [each for group in state_dict["param_groups"] for each in group["params"]]
    parameters = [each for group in groups for each in group["params"]]
    for key, parameter in zip(saved, parameters, strict=True):
        for part, value in state_dict["state"].get(key, {}).items():
            if isinstance(value, torch.Tensor) and value.shape not in ((), parameter.shape):
                rule = f"have the shape {tuple(parameter.shape)} of parameter {key!r} in {part!r}"
                raise invalid(name, rule, tuple(value.shape), remedy)
    return list(zip(saved, parameters, strict=True))


def describe(shards: OwnedShards) -> Entries:
    """Return what there is of state, of the parameters of which this rank is the first owner.

    Raises:
        ValueError: some of it is neither for every element nor for all at once.
    """
    layout = shards.layout
    return {
        index: {key: _entry(key, value, layout, shards.rank, index) for key, value in state.items()}
        for index, state in shards.states.items()
        if layout.first_owner(index) == shards.rank
    }


def gather_entries(shards: OwnedShards, carrier: Carrier | None) -> Entries:
    """Return what there is of state anywhere, by parameter in their order. Collective."""
    entries = describe(shards)
    if carrier is not None:
        mine = torch.frombuffer(bytearray(pickle.dumps(entries)), dtype=torch.uint8)
        sizes = carrier.tell(torch.tensor([mine.numel()]))
        theirs = {p: torch.empty(int(sizes[p]), dtype=torch.uint8) for p in carrier.peers}
        chunk_bytes = shards.layout.split.chunk_bytes
        arrivals = {peer: [payload] for peer, payload in theirs.items()}
        carrier.carry([Parcel([mine], carrier.peers)], arrivals, chunk_bytes=chunk_bytes)
        for payload in theirs.values():
            entries.update(pickle.loads(payload.numpy().tobytes()))
    return dict(sorted(entries.items()))


def gather(
    parameters: Sequence[torch.Tensor], shards: OwnedShards, carrier: Carrier | None
) -> dict[int, State]:
    """Return the whole state, by parameter, each tensor of its parameter's shape. Collective.

    On the host: a device that holds its own part need not have room for all.
    """
    entries = gather_entries(shards, carrier)
    layout, mine = shards.layout, shards.states
    whole: dict[int, State] = {index: {} for index in entries}
    sent: list[torch.Tensor] = []
    arrivals: dict[int, list[torch.Tensor]] = {p: [] for p in (carrier.peers if carrier else ())}
    for index, key, entry in _each(entries):
        parameter = parameters[index]
        if isinstance(entry, Single):
            whole[index][key] = copy_of(entry.value)
            continue
        field = torch.empty_like(parameter, dtype=entry.dtype, device="cpu", requires_grad=False)
        whole[index][key] = field
        if layout.owns(shards.rank, index):
            flat(field)[layout.span(shards.rank, index)] = mine[index][key]
            sent.append(mine[index][key])
        for peer, fields in arrivals.items():
            fields.append(flat(field)[layout.span(peer, index)])
    if carrier is not None:
        parcels = [Parcel(sent, carrier.peers)]
        carrier.carry(parcels, arrivals, chunk_bytes=layout.split.chunk_bytes)
    return whole


def move(
    parameters: Sequence[torch.Tensor], shards: OwnedShards, new: Ownership, carrier: Carrier
) -> dict[int, State]:
    """Return this rank's state under ``new``: what it has, and what others owned. Collective.

    Only ranges that change their owner travel.
    """
    entries = gather_entries(shards, carrier)
    old, mine, rank = shards.layout, shards.states, shards.rank
    states: dict[int, State] = {index: {} for index in entries if new.owns(rank, index)}
    sent: dict[int, list[torch.Tensor]] = {peer: [] for peer in carrier.peers}
    arrivals: dict[int, list[torch.Tensor]] = {peer: [] for peer in carrier.peers}
    for index, key, entry in _each(entries):
        parameter, before, after = parameters[index], old.span(rank, index), new.span(rank, index)
        had = mine.get(index, {}).get(key)
        if isinstance(entry, Single):
            if index in states:
                states[index][key] = copy_of(entry.value, device=_device(entry, parameter))
            continue
        if index in states:
            states[index][key] = field = _kept(entry, parameter, had, before, after)
            for peer, fields in arrivals.items():
                fields.append(field[_within(common(old.span(peer, index), after), after)])
        if had is not None:
            for peer, fields in sent.items():
                fields.append(had[_within(common(new.span(peer, index), before), before)])
    parcels = [Parcel(fields, [peer]) for peer, fields in sent.items()]
    carrier.carry(parcels, arrivals, chunk_bytes=new.split.chunk_bytes)
    return states


def _each(entries: Entries) -> Iterator[tuple[int, str, Spread | Single]]:
    for index, state in entries.items():
        for key, entry in state.items():
            yield index, key, entry


def _kept(
    entry: Spread, parameter: torch.Tensor, had: torch.Tensor | None, before: slice, after: slice
) -> torch.Tensor:
    """Return memory for the span ``after``, with what was owned ``before`` in its place."""
    size, device = after.stop - after.start, _device(entry, parameter)
    field = torch.empty(size, dtype=entry.dtype, device=device)
    both = common(before, after)
    if had is not None:
        field[_within(both, after)] = had[_within(both, before)]
    return field


def _within(part: slice, span: slice) -> slice:
    """Return where ``part`` of a span lies in it; nothing where it is empty."""
    if part.stop <= part.start:
        return slice(0, 0)
    return slice(part.start - span.start, part.stop - span.start)


def _entry(key: str, value: Any, layout: Ownership, rank: int, index: int) -> Spread | Single:
    if not isinstance(value, torch.Tensor):
        return Single(value, None)
    if value.dim() == 0:
        return Single(value.cpu(), value.device.type)
    span = layout.span(rank, index)
    if value.shape != (size := span.stop - span.start,):
        rule = f"keep a value for each of {size} elements, or one for all"
        got = f"a state {key!r} of shape {tuple(value.shape)}"
        raise invalid("ShardedOptimizer(optimizer)", rule, got, "It is not element-wise.")
    return Spread(value.dtype, value.device.type)


def _device(entry: Spread | Single, parameter: torch.Tensor) -> torch.device:
    return parameter.device if entry.device == parameter.device.type else torch.device("cpu")
