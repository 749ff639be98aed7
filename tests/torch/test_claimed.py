"""A step's claims as its loop sees them: each sample once, however ranks go through the step."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader

from evenstep._planner import Plan
from evenstep.solve._deal import Deal
from evenstep.torch._data.deal._plans import DealtPlan, PlanBook, StepSpan

from .loader_fakes import Items, OpenPlans, Ranks, flat

SIZE, NUM_STEPS = 24, 20


def numbers(batches):
    """The samples in batches."""
    return flat(batch[0].tolist() for batch in batches)


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

            assert sorted(flat(done)) == list(range(number * SIZE, (number + 1) * SIZE))
            assert [step.num_samples for step in steps] == [len(mine) for mine in done]


def test_what_a_step_goes_by_stays():
    """Though the plan after it is heard of while it is under way."""
    book, span = PlanBook(0, 8), StepSpan(0, 0, 8)
    book.apply(Plan(0, 0, (4, 4), first=(2, 2)), 0)
    opened = book.open_step(span)
    book.on_plan(Plan(1, 1, (8, 0), first=(4, 0)), now=1)

    assert opened.plan.batch_size == (4, 4)
    assert opened.kept().tolist() == [1]
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
