"""Refuses in ``prepare`` what differs between ranks and would silently change the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .._exchange._world_check import (
    Facts,
    code_of,
    described,
    difference,
    differing,
    digest,
    first_different,
    qualified,
)
from .._planner import in_words
from .._private_torch import original_of
from ._data._protocols import Collectives
from ._data.compare._content import compare_content
from ._data.compare._stated import (
    REMEDIES,
    check_whole,
    compare_orders,
    loader_facts,
    read_facts,
    shard_of,
)
from ._model._compiled import ddp_of
from ._model._sharded import fsdp_layers
from ._options import Runtime

Listing = dict[str, str]

_OF_DDP = ("find_unused_parameters", "static_graph", "broadcast_buffers")


def model_facts(module: nn.Module) -> dict[str, str]:
    """Return what decides on collectives and results, but for what ``model_listings`` has.

    Devices may differ, and whether it is compiled.
    """
    ddp = ddp_of(module)
    plain = original_of(module if ddp is None else ddp.module)
    kind = "DDP" if ddp is not None else "FSDP2" if fsdp_layers(module) else "plain"
    facts = {"The model's class": qualified(type(plain)), "The model's wrapper": kind}
    for name in _OF_DDP if ddp is not None else ():
        facts[f"`DistributedDataParallel({name}=...)`"] = repr(getattr(ddp, name, None))
    return facts


def model_listings(module: nn.Module) -> dict[str, Listing]:
    """Return each parameter, buffer and layer of torch's own in ``module``, by its name."""
    return {
        "parameter": _each(module.named_parameters(), _of_parameter),
        "buffer": _each(module.named_buffers(), _of_tensor),
        "layer": {
            _bare(name): f"{type(layer).__name__}({layer.extra_repr()})"
            for name, layer in module.named_modules()
            if type(layer).__module__.startswith("torch.nn.modules.")
        },
    }


def _each(
    tensors: Iterable[tuple[str, torch.Tensor]], text_of: Callable[[torch.Tensor], str]
) -> Listing:
    return {_bare(name): text_of(tensor) for name, tensor in tensors}


def _of_parameter(parameter: torch.Tensor) -> str:
    return _of_tensor(parameter) + ("" if parameter.requires_grad else ", frozen")


def _of_tensor(tensor: torch.Tensor) -> str:
    try:
        shape = tuple(tensor.shape)
    except RuntimeError:  # of a lazy module, before its first forward
        return "uninitialized"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def _bare(name: str) -> str:
    """Return a name without what DDP and ``torch.compile`` put before it."""
    return f"{name}.".replace("_orig_mod.", "").removeprefix("module.").removesuffix(".")


_CALL = "The balancer's next call"
_REMEDIES = {
    _CALL: "Prepare the same things in the same order on all ranks.",
    "`Balancer(bounds=...)`": "What one worker can take goes into a tuple with a number for each, "
    "such as `Bounds(max=(8, 64))`.",
} | REMEDIES


def settings_facts(runtime: Runtime, unit: Any, **others: Any) -> dict[str, str]:
    """Return what a balancer was made with, as far as it changes results, by name."""
    others["unit"] = unit
    facts = {f"`Balancer({name}=...)`": described(value) for name, value in others.items()}
    for version, checksum in code_of(unit).items():
        facts[f"The code of `Balancer(unit=...)`, in Python {version},"] = checksum
    for name in ("freshness", "claims", "sample_seed"):
        facts[f"`Runtime({name}=...)`"] = described(getattr(runtime, name))
    return facts


def check_prepared(
    ranks: Collectives,
    parts: Sequence[Any],
    *,
    settings: Mapping[str, str],
    global_batch_size: int | None,
    weighting: str,
    stream: str | None,
) -> None:
    """Raise on every rank if ranks differ in what is set and changes results. Collective.

    Before models are wrapped, as DDP would wait for parameters that others do not have.

    Args:
        ranks: all workers.
        parts: to be prepared.
        settings: of the balancer, by name.
        global_batch_size: as given; batch sizes of ranks may then differ by one.
        weighting, stream: as given to ``prepare``.

    Raises:
        ValueError: they differ; the message names each difference, its values and the ranks.
    """
    if ranks.world_size == 1:
        return
    here = {"weighting": repr(weighting), "stream": repr(stream)}
    facts = {f"`Balancer.prepare({name}=...)`": value for name, value in here.items()}
    of_loader = partial(
        loader_facts,
        stream=stream,
        global_batch_size=global_batch_size,
        world_size=ranks.world_size,
    )
    _compare(ranks, "prepare", parts, facts | dict(settings), of_loader, stream=stream)


def check_content(ranks: Collectives, parts: Sequence[Any]) -> None:
    """Raise on every rank if samplers or data sets hold different samples. Collective.

    Raises:
        ValueError: they do; the message names a sample, its values and the ranks.
    """
    if ranks.world_size > 1:
        loaders = _labelled(parts, DataLoader, "loader")
        compare_orders(ranks, loaders)
        compare_content(ranks, loaders)


def check_eval(
    ranks: Collectives, loader: Any, *, lockstep: bool | str, cost: object = None
) -> None:
    """Raise on every rank if ranks differ in what they evaluate. Collective.

    Raises:
        ValueError: they differ; the message names each difference, its values and the ranks.
    """
    if ranks.world_size == 1:
        return
    given = {"lockstep": lockstep, "cost": cost}
    settings = {f"`Balancer.prepare_eval({name}=...)`": repr(one) for name, one in given.items()}
    if lockstep:
        settings["`DataLoader(batch_size=...)`"] = repr(getattr(loader, "batch_size", None))
    _compare(ranks, "prepare_eval", [loader], settings, read_facts)
    compare_orders(ranks, _labelled([loader], DataLoader, "loader"))


def _compare(
    ranks: Collectives,
    call: str,
    given: Sequence[Any],
    settings: Mapping[str, str],
    of_loader: Callable[[DataLoader[Any]], dict[str, str]],
    *,
    stream: str | None = None,
) -> None:
    """Compare all that can be read without fetching a sample."""
    problem: Exception | None = None
    row: Any = None
    listings: dict[str, dict[str, Listing]] = {}
    models, loaders = _labelled(given, nn.Module, "model"), _labelled(given, DataLoader, "loader")
    try:
        listings = {label: model_listings(model) for label, model in models.items()}
        facts: dict[str, dict[str, str]] = {"": dict(settings)}
        for label, model in models.items():
            facts[label] = facts.get(label, {}) | model_facts(model) | _digests(listings[label])
        for label, loader in loaders.items():
            facts[label] = facts.get(label, {}) | of_loader(loader)
        shards = [shard_of(loader, stream=stream) for loader in loaders.values()]
        row = _head(call, given), facts, shards
    except Exception as error:  # of the user's code; the other ranks would wait
        problem, row = error, in_words(error)
    rows = ranks.collect(row)
    if problem is not None:
        raise problem
    for rank, row in enumerate(rows):
        if isinstance(row, str):
            raise RuntimeError(f"`{call}` failed on rank {rank}, which has the traceback: {row}")
    _refuse(difference([head for head, _, _ in rows], _REMEDIES))
    for of_one in zip(*(shards for _, _, shards in rows), strict=True):
        check_whole(of_one)
    _refuse_facts(ranks, [facts for _, facts, _ in rows], listings)


def _head(call: str, given: Sequence[Any]) -> Facts:
    """Return what has to be alike before anything else can be compared."""
    kinds = {nn.Module: "model", DataLoader: "loader"}
    names = [
        next((name for kind, name in kinds.items() if isinstance(part, kind)), None)
        or type(part).__name__
        for part in given
    ]
    return {"": {_CALL: f"`{call}({', '.join(names)})`"}}


def _digests(listings: Mapping[str, Listing]) -> dict[str, str]:
    """Return a checksum of each long listing."""
    return {
        _plural(kind): digest(f"{name}: {text}" for name, text in listing.items())
        for kind, listing in listings.items()
    }


def _refuse_facts(
    ranks: Collectives, stated: Sequence[Facts], listings: Mapping[str, Mapping[str, Listing]]
) -> None:
    """Raise if facts differ; of a long listing, the first entry that does is asked for."""
    stated_facts = [{part: dict(facts) for part, facts in rank.items()} for rank in stated]
    different_facts = differing(stated)
    for label, kinds in listings.items():
        for kind, listing in kinds.items():
            if (label, _plural(kind)) not in different_facts:
                continue
            entry, values = first_different(ranks.collect(listing))
            for rank, value in zip(stated_facts, values, strict=True):
                del rank[label][_plural(kind)]
                rank[label][f"The {kind} `{entry}` of the model"] = value
    _refuse(difference(stated_facts, _REMEDIES))


def _labelled(parts: Sequence[Any], kind: type[Any], word: str) -> dict[str, Any]:
    """Return the parts of a kind, by what an error calls them: nothing, if there is one."""
    found = [part for part in parts if isinstance(part, kind)]
    if len(found) == 1:
        return {"": found[0]}
    return {f"{word} {number}": part for number, part in enumerate(found, 1)}


def _plural(kind: str) -> str:
    return f"The model's {kind}s"


def _refuse(text: str | None) -> None:
    if text is not None:
        raise ValueError(text)
