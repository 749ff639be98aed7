"""Ranks that are alike in what changes results, and what the workers of these tests run."""

from __future__ import annotations

import random
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    WeightedRandomSampler,
)

from evenstep.policies import Equal
from evenstep.torch import Runtime

from .compared_data import OF_DATA, OF_THREE
from .compared_parts import (
    Batches,
    Case,
    Drawing,
    Made,
    Numbers,
    Parts,
    Seeded,
    Whole,
    balancer,
    close,
    cropped,
    data,
    fails_on,
    flipped,
    linear,
    loads,
    mixed,
    of_rank,
    once,
    only,
    rows,
    seeded,
    settings,
    stock,
)
from .compared_settings import DIFFERENT

ALIKE: dict[str, Case] = {
    "seeds, and augmentation that they control": seeded,
    "augmentation that nothing controls": lambda rank: data(rank, Made(flipped)),
    "random lengths": lambda rank: data(rank, Made(cropped)),
    "the last bits of unlike hardware": lambda rank: data(
        rank, Made(lambda index: of_rank(rank, index))
    ),
    "a bit of everything": lambda rank: data(rank, Made(mixed)),
    "a data set that fails everywhere": lambda rank: data(rank, Made(fails_on(1, 1))),
    "streams": lambda rank: balancer().prepare(
        linear(), stock(Numbers(100 * rank, 30 + rank)), stream="sharded"
    ),
    "streams that all read": lambda rank: balancer().prepare(
        linear(), stock(Numbers()), stream="same"
    ),
    "how samples are fetched": lambda rank: loads(
        rank, **only(rank, 1, num_workers=1, prefetch_factor=3, persistent_workers=True, timeout=9)
    ),
    "weighted samplers": lambda rank: data(
        rank,
        sampler=WeightedRandomSampler(
            [1.0] * 24, 12, generator=torch.Generator().manual_seed(rank)
        ),
    ),
    "a sampler with generators of its own": lambda rank: data(rank, sampler=Drawing(rank)),
    "a sampler that yields once": once,
    "a batch sampler that knows its rank": lambda rank: balancer(8).prepare(
        linear(), DataLoader(rows(), batch_sampler=Batches(8, rank))
    ),
    "the remedies": lambda rank: [
        data(rank, sampler=Parts(24, 0, 1, shows=True)),
        data(rank, sampler=Seeded(0)),
    ],
    "a part drawn anew each epoch": lambda rank: data(
        rank, rows(48), sampler=Whole(48, 0, 2, shows=False)
    ),
    "collate functions without a name": lambda rank: data(
        rank, collate_fn=lambda rows: rows[rank:]
    ),
    "a batch for each rank, as even as can be": lambda rank: balancer(9).prepare(
        linear(), stock(batch_size=5 - rank)
    ),
    "a distributed sampler": lambda rank: data(
        rank, sampler=DistributedSampler(range(24), seed=rank)
    ),
    "devices and how a run is watched": lambda rank: settings(
        runtime=Runtime(line_every=1 + rank, deadline_s=30.0 + rank, hooks=(print,) * rank)
    ),
    "how much is evaluated at once": lambda rank: balancer().prepare_eval(
        stock(batch_size=4 + rank)
    ),
    "settings said in two ways": lambda rank: settings(policy=("equal", Equal())[rank]),
    "a unit without a name": lambda rank: settings(unit=lambda batch: batch[0].numel() + rank * 0),
}


OF_TWO = DIFFERENT | OF_DATA


def provoke(rank: int) -> dict[str, str]:
    """Return what each case of differing ranks raises: type and text."""
    texts = {}
    for name, (case, _) in (OF_TWO if dist.get_world_size() == 2 else OF_THREE).items():
        try:
            case(rank)
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
        close()
    return texts


class Listed(Made):
    """Samples of a list that rank 0 does not have."""

    def __len__(self) -> int:
        if dist.get_rank() == 0:
            raise FileNotFoundError("list.txt")
        return super().__len__()


def unreadable(rank: int) -> str:
    """Return what ``prepare`` raises where the data set of rank 0 cannot be looked at."""
    try:
        data(rank, Listed(of_rank))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def accept(rank: int) -> tuple[dict[str, str], list[str]]:
    """Return what cases that are alike raise, and their warnings."""
    texts = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, case in ALIKE.items():
            before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
            try:
                case(rank)
            except Exception as error:
                texts[name] = f"{type(error).__name__}: {error}"
            close()
            after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
            if name == "a bit of everything" and not all(
                map(lambda one, two: bool(np.all(one == two)), before[1:], after[1:])
            ):
                texts[name] = "random states have changed"
    return texts, [str(warning.message) for warning in caught]
