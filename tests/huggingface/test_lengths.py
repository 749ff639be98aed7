"""`Trainer` by the lengths of padded or packed samples trains what it trains in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.testing import run_workers
from evenstep.torch import Cost

from .._tiers import Groups, slow_but
from ..torch.plans import Restless
from .lengths import Steep, Table, Texts, packing, padding
from .losses import gathering_loss
from .small import bert, distance, gpt_in_double, offline
from .trainer_runs import Case, Result, make, run

pytestmark = pytest.mark.cluster


def mean_of_sequences(trainer: Any, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
    """Return the mean over the sequences of a packed row, however many targets each has."""
    ids, labels, which = inputs["input_ids"], inputs["labels"][0, 1:], inputs["seq_idx"][0, 1:]
    logits = model(input_ids=ids, position_ids=inputs["position_ids"])["logits"][0, :-1]
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    kinds = nn.functional.one_hot(which.long()).to(losses.dtype)
    return ((losses @ kinds) / ((labels != -100).to(losses.dtype) @ kinds)).mean()


BATCH_SIZE = 12  # of all ranks together
CAUSAL = Case(gpt_in_double, data=Table, collator=partial(padding, "DataCollatorForSeq2Seq"))
CLASSIFIER = replace(
    CAUSAL,
    model=partial(bert, "BertForSequenceClassification", 3),
    data=partial(Texts, classes=True),
    collator=partial(padding, "DataCollatorWithPadding"),
)
GATHERS = replace(CAUSAL, loss=gathering_loss)
PACKED = replace(CAUSAL, data=Steep, collator=packing)
REBALANCED = {"train_sampling_strategy": "batch_rebalance"}
CASES: dict[str, tuple[Case, Any]] = {
    "causal, a column of lists": (CAUSAL, "input_ids"),
    "causal, accumulated": (replace(CAUSAL, num_accumulated=2), "input_ids"),
    "causal, tokens capped": (CAUSAL, Cost("input_ids", max_size=16)),
    "causal, batch_rebalance": (replace(CAUSAL, more=REBALANCED), None),
    "causal, batch_rebalance, accumulated, drop_last": (
        replace(CAUSAL, num_accumulated=2, more={**REBALANCED, "dataloader_drop_last": True}),
        None,
    ),
    "classifier, a field of its samples": (CLASSIFIER, "input_ids"),
    "classifier, lengths seen in batches": (CLASSIFIER, Cost(from_batch="attention_mask")),
    "classifier, seen in samples, accumulated": (
        replace(CLASSIFIER, num_accumulated=2),
        Cost(from_batch="input_ids"),
    ),
    "classifier, accumulated": (replace(CLASSIFIER, num_accumulated=2), "input_ids"),
    "causal, gathers, accumulated": (replace(GATHERS, num_accumulated=2), "input_ids"),
    "causal, gathers, tokens capped": (GATHERS, Cost("input_ids", max_size=16)),
    "causal, gathers, accumulated, by count": (replace(GATHERS, num_accumulated=2), None),
    "classifier, gathers, accumulated": (
        replace(CLASSIFIER, num_accumulated=2, loss=gathering_loss),
        "input_ids",
    ),
    "packed": (PACKED, "input_ids"),
    "packed, accumulated": (replace(PACKED, num_accumulated=2), "input_ids"),
    "packed, by count": (PACKED, None),
    "packed, accumulated, by count": (replace(PACKED, num_accumulated=2), None),
    "packed, tokens capped": (PACKED, Cost("input_ids", max_size=16)),
    "packed, lengths seen in samples": (PACKED, Cost(from_batch="input_ids")),
    "packed, a mean of means, by count": (replace(PACKED, loss=mean_of_sequences), None),
    "packed, gathers, accumulated, by count": (
        replace(PACKED, num_accumulated=2, loss=gathering_loss),
        None,
    ),
}


def by_length(
    rank: int, folder: str, names: list[str], world_size: int
) -> dict[str, tuple[Result, list[int], bool]]:
    """Return what came of each case, this rank's samples in each step, and if they are padded."""
    offline(folder)
    torch.set_default_dtype(torch.float64)  # Trainer adds up losses in the default
    found = {}
    for name in names:
        case, cost = CASES[name]
        size = BATCH_SIZE // (world_size * case.num_accumulated)
        balancing = {"policy": Restless()} if cost is None and not case.more else {}
        balancing |= {} if cost is None else {"cost": cost}
        trainer = make(folder, case, balancing=balancing, per_device_train_batch_size=size)
        counts = _watched(trainer)
        result = run(trainer)
        costs = trainer.balancer._parts.loaders[0].costs
        found[name] = result, counts, costs is None or costs.cost.padded
    return found


def alone(rank: int, folder: str, names: list[str]) -> dict[str, Result]:
    """Return the same of plain Trainer in one process, with the whole global batch at once."""
    offline(folder)
    torch.set_default_dtype(torch.float64)
    whole = {"per_device_train_batch_size": BATCH_SIZE, "gradient_accumulation_steps": 1}
    return {name: run(make(folder, CASES[name][0], balancing=None, **whole)) for name in names}


def _watched(trainer: Any) -> list[int]:
    from transformers import TrainerCallback

    counts: list[int] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            counts.append(trainer.balancer.num_samples)

    trainer.add_callback(Watch())
    return counts


FIRST = (("causal, a column of lists", 2),)
RUNS = [*FIRST, *((name, 3) for name in CASES)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each case, as some ranks train it, and as one process does."""

    def run(wanted):
        folder = str(tmp_path_factory.mktemp("lengths"))
        theirs = run_workers(1, alone, folder, sorted({name for name, _ in wanted}))[0]
        found = {}
        for size in sorted({size for _, size in wanted}):
            names = [name for name, other in wanted if other == size]
            ranks = run_workers(size, by_length, folder, names, size)
            found |= {
                (name, size): ([rank[name] for rank in ranks], theirs[name]) for name in names
            }
        return found

    return Groups(FIRST, RUNS, run)


@pytest.mark.parametrize(("name", "world_size"), slow_but(FIRST, RUNS))
def test_by_length_it_ends_where_one_process_ends(runs, name, world_size):
    """Parameters and every loss that is logged, whoever computes which samples."""
    of_ranks, theirs = runs[name, world_size]
    ours = of_ranks[0][0]

    assert distance(ours.parameters, theirs.parameters) <= 1e-9
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-9)


@pytest.mark.parametrize(("name", "world_size"), slow_but(FIRST, RUNS))
def test_ranks_have_unlike_numbers_of_samples(runs, name, world_size):
    """Of the same global batches; and transformers' collators are seen to pad.

    Where lengths are not known beforehand, it is the times that decide whether numbers are unlike.
    """
    of_ranks, _ = runs[name, world_size]
    case, cost = CASES[name]
    steps = list(zip(*[counts for _, counts, _ in of_ranks], strict=True))

    assert {padded for _, _, padded in of_ranks} == {case.collator is not packing or cost is None}
    assert {sum(step) for step in steps} <= {BATCH_SIZE, 50 % BATCH_SIZE}
    if not (isinstance(cost, Cost) and cost.from_batch is not None):
        assert any(len(set(step)) > 1 for step in steps)
