"""Claims in real training: each sample once, the same gradient, and less waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from evenstep._planner import Plan
from evenstep.claims import Hybrid
from evenstep.events import ClaimsSwitched, StepMeasured
from evenstep.policies import Auto, Equal, Fixed
from evenstep.solve._deal import Deal
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds, Runtime
from evenstep.torch._data.deal._plans import DealtPlan, PlanBook, StepSpan

from .._tiers import Groups, slow_but
from .counts import Linear, stock
from .loader_fakes import Items, OpenPlans, Ranks
from .loader_fakes import flat as flattened
from .loops import text_of
from .matrix import flat, wrapped
from .plans import Restless
from .stream_fakes import Numbers

TAIL = 48 * 6 + 13
BY_FOUR = Bounds(vary="count", granularity=4)
CLAIMS = Runtime(line_every=None, claims=Hybrid(first=0.25))


class Slow(torch.autograd.Function):
    """Nothing, but that its backward takes a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


def run(
    wrap: str,
    num_samples: int,
    policy: Any,
    *,
    bounds: Bounds | None = None,
    runtime: Runtime = CLAIMS,
    all_at_once: bool = False,
    sample_s: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Return what an epoch gave here: rows of every forward, samples, errors, counts."""
    rows: list[list[int]] = []
    seen, errors, said = [], [], []
    x = stock(num_samples).dataset.tensors[0]
    size = 16 * dist.get_world_size()
    with Balancer(policy=policy, bounds=bounds or Bounds(), runtime=runtime) as balancer:
        model, loader = balancer.prepare(wrapped(Linear(), wrap), stock(num_samples, **options))
        for number, step in enumerate(loader.steps()):
            rows.append([])
            if all_at_once:
                rows[-1] = [part.num_samples for part in step.micro_batches]
                step.backward(lambda batch: (model(batch[0]) ** 2).mean())
                seen += torch.cat([part.batch[1] for part in step.micro_batches]).tolist()
            else:
                for mine, numbers in step:
                    rows[-1].append(len(mine))
                    if step.num_samples:
                        seen += numbers.tolist()
                    (Slow.apply(model(mine), sample_s * len(mine)) ** 2).mean().backward()
            said.append((step.num_samples, step.num_micro_batches, balancer.num_samples))
            alone = Linear()
            (alone(x[size * number : size * number + size]) ** 2).mean().backward()
            errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
            model.zero_grad()
    return {
        "rows": rows,
        "seen": seen,
        "error": max(errors),
        "said": said,
        "fetched": int(loader.dataset.fetched.sum()),
    }


SLOW = {"policy": Equal(), "sample_s": 0.002}
"""Rank 2 takes so long for each of its samples."""
EPOCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "restless": ("ddp", {"policy": Restless()}),
    "restless, workers": ("ddp", {"policy": Restless(), "num_workers": 2}),
    "restless, fsdp2": ("fsdp2", {"policy": Restless()}),
    "count": ("ddp", {"policy": Restless(), "bounds": BY_FOUR}),
    "count, workers": ("ddp", {"policy": Restless(), "bounds": BY_FOUR, "num_workers": 1}),
    "one is slow": ("ddp", SLOW),
    "one is slow, workers": ("ddp", SLOW | {"num_workers": 2}),
    "one is slow, count": ("ddp", SLOW | {"bounds": BY_FOUR}),
    "one has nothing": ("ddp", {"policy": Fixed((24, 24, 0)), "bounds": Bounds(min=0)}),
    "all at once": ("ddp", {"policy": Restless(), "all_at_once": True}),
}


def epochs(rank: int, names: Sequence[str]) -> dict[str, Any]:
    """Return what came of epochs with short last steps: wrappers, workers, plans that change."""
    found = {}
    for name in names:
        wrap, settings = EPOCHS[name]
        mine = settings if rank == 2 else settings | {"sample_s": 0.0}
        found[name] = run(wrap, TAIL, **mine)
    return found


def ahead(rank: int, depth: int, *, whole: bool) -> tuple[list[int], float]:
    """Return what a loop counts amiss that takes so many steps before it uses the first of them.

    And the largest gradient error.
    """
    x = stock(32 * 16).dataset.tensors[0]
    errors, amiss = [], []
    with Balancer(policy=Equal(), runtime=CLAIMS) as balancer:
        model, loader = balancer.prepare(DistributedDataParallel(Linear()), stock(32 * 16))
        steps, waiting = loader.steps(), deque[Any]()
        for number in range(len(loader)):
            waiting.extend(islice(steps, depth + 1 - len(waiting)))
            step = waiting.popleft()
            if whole:
                step.backward(lambda batch: (model(batch[0]) ** 2).mean())
            else:
                for mine, _ in step:
                    (model(mine) ** 2).mean().backward()
            amiss.append(balancer.num_samples - step.num_samples)
            alone = Linear()
            (alone(x[32 * number : 32 * number + 32]) ** 2).mean().backward()
            errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
            model.zero_grad()
    return amiss, max(errors)


def by_auto(rank: int) -> tuple[list[ClaimsSwitched], int]:
    """Return when `auto` switched claims, and how many steps were measured."""
    events: list[Any] = []
    runtime = Runtime(line_every=None, hooks=(events.append,))
    with Balancer(policy=Auto(), runtime=runtime) as balancer:
        model, loader = balancer.prepare(DistributedDataParallel(Linear()), stock(32 * 40))
        for number, step in enumerate(loader.steps()):
            slow = 4.0 if number % 3 == rank else 1.0
            for mine, _ in step:
                (Slow.apply(model(mine), 0.0005 * slow * len(mine)) ** 2).mean().backward()
            model.zero_grad()
    switched = [event for event in events if isinstance(event, ClaimsSwitched)]
    return switched, sum(isinstance(event, StepMeasured) for event in events)


def opened(claims: Any, *, plain: bool = False, **settings: Any) -> None:
    model, stream = settings.pop("model", Linear)(), settings.pop("stream", None)
    data = stock(96) if stream is None else DataLoader(Numbers(96), batch_size=16)
    balancer = Balancer(runtime=Runtime(line_every=None, claims=claims), **settings)
    _, loader = balancer.prepare(DistributedDataParallel(model), data, stream=stream)
    next(iter(loader) if plain else loader.steps())


MISTAKES = {
    "plain loop": (dict(plain=True), "got a loop over `loader`. Loop over `loader.steps()`"),
    "units": (dict(unit=lambda batch: 1.0), "got a unit other than samples"),
    "granularities": (
        dict(bounds=Bounds(granularity=(4, 2))),
        "got different granularities, (4, 2)",
    ),
    "stream": (dict(stream="same"), "got an `IterableDataset`"),
    "probe": (dict(bounds=Bounds(max="probe")), "got `Bounds(max='probe')`"),
    "norm": (
        dict(model=lambda: nn.Sequential(Linear(), nn.BatchNorm1d(2)).double()),
        'Use `Bounds(vary="count")`',
    ),
}


def mistakes(rank: int) -> dict[str, str]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: text_of(lambda given=given: opened(Hybrid(), **given))
            for name, (given, _) in MISTAKES.items()
        }


def two_models(rank: int) -> dict[str, float]:
    """Return the largest gradient error of two models in one loop, whose counts differ by rank."""
    found = {}
    for name, runtime in (("as planned", Runtime(line_every=None)), ("claimed", CLAIMS)):
        x = stock(48 * 5).dataset.tensors[0]
        errors = []
        with Balancer(policy=Fixed((32, 16)), bounds=Bounds(max=(16, 48)), runtime=runtime) as it:
            first, second, loader = it.prepare(
                DistributedDataParallel(Linear()),
                DistributedDataParallel(Linear()),
                stock(48 * 5, batch_size=24),
            )
            for number, step in enumerate(loader.steps()):
                for mine, _ in step:
                    (first(mine) ** 2).mean().backward()
                    (second(mine) ** 4).mean().backward()
                for model, power in ((first, 2), (second, 4)):
                    alone = Linear()
                    (alone(x[48 * number : 48 * number + 48]) ** power).mean().backward()
                    errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
                    model.zero_grad()
        found[name] = max(errors)
    return found


FIRST = ("restless", "one is slow")


@pytest.fixture(scope="module")
def found():
    """What each of three ranks says about an epoch."""

    def run(names):
        ranks = run_workers(3, epochs, names)
        return {name: [rank[name] for rank in ranks] for name in names}

    return Groups(FIRST, EPOCHS, run)


@pytest.mark.cluster
@pytest.mark.parametrize("epoch", slow_but(FIRST, EPOCHS))
def test_each_sample_is_trained_on_once(found, epoch):
    """Whoever computed it, in the short last step too."""
    seen = chain.from_iterable(each["seen"] for each in found[epoch])

    assert sorted(seen) == list(range(TAIL))


@pytest.mark.cluster
@pytest.mark.parametrize("epoch", slow_but(FIRST, EPOCHS))
def test_the_gradient_is_that_of_one_process(found, epoch):
    """In every step: 1e-12."""
    assert max(each["error"] for each in found[epoch]) <= 1e-12


@pytest.mark.cluster
@pytest.mark.parametrize("epoch", slow_but(FIRST, [e for e in EPOCHS if "one is slow" in e]))
def test_the_others_take_over_from_a_slow_rank(found, epoch):
    """Within the very step, under a plan that gives all the same: 16 samples.

    In one step of a busy machine, somebody else may be the slow one.
    """
    counts = [[n for n, _, _ in each["said"][1:-1]] for each in found[epoch]]

    assert fmean(counts[2]) <= 14
    assert min(map(sum, zip(*counts, strict=True))) == 48


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("epoch", ["count", "count, workers", "one is slow, count"])
def test_counts_keep_their_shape(found, epoch):
    """Forwards of four samples; what is left of a part may be fewer in the short last step."""
    for each in found[epoch]:
        assert {size for rows in each["rows"][:-1] for size in rows} == {4}


@pytest.mark.cluster
@pytest.mark.parametrize("epoch", slow_but(FIRST, EPOCHS))
def test_a_step_knows_what_it_had(found, epoch):
    """When it is over: samples, forwards, and the balancer's own count."""
    for each in found[epoch]:
        made = [(sum(rows), len(rows)) for rows in each["rows"]]
        for (samples, forwards, counted), (computed, ran) in zip(each["said"], made, strict=True):
            assert samples == counted
            assert forwards == ran
            assert computed == max(samples, 1)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_loop_that_wants_it_whole_gets_the_plan(found):
    """`micro_batches` and `step.backward` know all before the first forward: nothing is claimed."""
    sizes = [each["said"] for each in found["all at once"]]

    assert all(sum(n for n, _, _ in step) == 48 for step in list(zip(*sizes, strict=True))[:-1])


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("epoch", ["restless, workers", "one is slow, workers"])
def test_samples_are_fetched_ahead_and_others_on_demand(found, epoch):
    """What was used was asked for; what is asked for in vain is what changed hands."""
    assert sum(len(each["seen"]) for each in found[epoch]) == TAIL
    assert TAIL <= sum(each["fetched"] for each in found[epoch]) <= 3 * TAIL


@pytest.mark.cluster
def test_auto_tries_claims_where_workers_wait():
    """One after the other is slow for a step, which no plan can foresee."""
    switched, num_steps = run_workers(2, by_auto)[0]

    assert switched[0].on
    assert num_steps >= 39  # the last one's reports may still be on their way at the close


@pytest.mark.cluster
def test_two_models_in_one_loop_wait_for_nobody_in_between():
    """Their first forwards and broadcasts are collective, and ranks have unlike numbers of them."""
    for errors in run_workers(2, two_models):
        assert set(errors) == {"as planned", "claimed"}
        assert max(errors.values()) <= 1e-12


@pytest.mark.cluster
@pytest.mark.parametrize(("depth", "whole"), [(1, True), (10, False)])
def test_a_loop_may_take_steps_before_it_uses_the_one_at_hand(depth, whole):
    """What it claims then is of the step that it uses, and counted there."""
    for amiss, error in run_workers(2, partial(ahead, depth=depth, whole=whole)):
        assert amiss == [0] * 16
        assert error <= 1e-12


@pytest.fixture(scope="module")
def texts():
    """What each mistake says."""
    return run_workers(2, mistakes)[0]


@pytest.mark.cluster
@pytest.mark.parametrize("mistake", MISTAKES)
def test_claims_that_cannot_be_are_refused(texts, mistake):
    """With what stands against them, and the remedy."""
    assert "Runtime(claims=Hybrid(...))" in texts[mistake]
    assert MISTAKES[mistake][1] in texts[mistake]


@pytest.mark.cluster
def test_a_wish_that_is_none_is_named():
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=r"`Runtime\(claims=...\)` must be .*, got 'on'"):
        Runtime(claims="on")


SIZE, NUM_STEPS = 24, 20


def numbers(batches):
    """The samples in batches."""
    return flattened(batch[0].tolist() for batch in batches)


def once(step):
    """The usual loop."""
    seen = []
    for batch in step:
        seen.append(batch)
        yield
    return seen if step.num_samples else []


def twice(step):
    """As two models do that are trained one after the other: the same samples for both."""
    first = yield from once(step)
    again = yield from once(step)
    assert numbers(again) == numbers(first)
    return again


def broken_off(step):
    """A loop that is left early, and begun again."""
    for _ in step:
        yield
        break
    return (yield from once(step))


def asking(step):
    """Ask in the middle how much there is."""
    seen, expected = [], None
    for batch in step:
        seen.append(batch)
        expected = numbers(part.batch for part in step.micro_batches)
        yield
    assert numbers(seen) == expected
    return seen if step.num_samples else []


def at_once(step):
    """Ask before the first forward."""
    yield
    return [part.batch for part in step.micro_batches if part.num_samples]


WAYS = (once, twice, broken_off, asking, at_once)


def carried_out(steps, ways, rng):
    """Return what each rank computed of a step; they come on in a random order."""
    done, going = (
        [[] for _ in steps],
        dict(enumerate(map(lambda way, step: way(step), ways, steps))),
    )
    while going:
        rank = int(rng.choice(list(going)))
        try:
            next(going[rank])
        except StopIteration as end:
            done[rank] = numbers(end.value)
            del going[rank]
    return done


@pytest.mark.parametrize(
    "ways", [(way,) for way in WAYS] + [WAYS], ids=[*(way.__name__ for way in WAYS), "mixed"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_sample_of_a_step_is_handed_out_once(ways, seed):
    """Under plans that change, of which the next one is known before a step is over."""
    rng = np.random.default_rng(seed)
    plans = OpenPlans(3, SIZE, seed=seed)
    stock = [DataLoader(Items(SIZE * NUM_STEPS), batch_size=8) for _ in range(3)]
    with Ranks(stock.__getitem__, plans, world_size=3, size=SIZE) as ranks:
        epochs = [loader.steps() for loader in ranks.loaders]
        for number, steps in enumerate(zip(*epochs, strict=True)):
            done = carried_out(steps, [ways[i] for i in rng.integers(len(ways), size=3)], rng)

            assert sorted(flattened(done)) == list(range(number * SIZE, (number + 1) * SIZE))
            assert [step.num_samples for step in steps] == [len(mine) for mine in done]


def test_what_a_step_goes_by_stays():
    """Though the plan after it is heard of while it is under way."""
    book, span = PlanBook(0, 8), StepSpan(0, 0, 8)
    book.apply(Plan(0, 0, (4, 4), first=(2, 2)), 0)
    opened = book.open_step(span)
    book.on_plan(Plan(1, 1, (8, 0), first=(4, 0)), now=1)

    assert opened.plan.batch_size == (4, 4)
    assert opened.kept.tolist() == [1]
    assert opened.deal.slots(1).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("plan", "num_samples", "forwards"),
    [
        (Plan(0, 0, (8, 8)), 8, (8,)),
        (Plan(0, 0, (8, 8)), 14, (7, 7)),
        (Plan(0, 0, (12, 4)), 12, (12,)),
        (Plan(0, 0, (4, 12)), 8, (8,)),
        (Plan(0, 0, (8, 8), max_forward=(3, 3)), 8, (3, 3, 2)),
        (Plan(0, 0, (8, 8), max_forward=(4, 4), granularity=(4, 4)), 12, (4, 4, 4)),
    ],
)
def test_no_claimed_forward_is_larger_than_a_planned_one(plan, num_samples, forwards):
    """Nor than at an equal split: memory was never asked for more."""
    opened = DealtPlan(0, plan, Deal.fresh(np.array(plan.batch_size)))

    assert opened.forwards(num_samples) == forwards
