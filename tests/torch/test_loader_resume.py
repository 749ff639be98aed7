"""A run that stops and goes on: every sample once, whatever the number of ranks."""

from __future__ import annotations

from itertools import chain, repeat

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Runtime

from .._tiers import slow_but
from .loader_fakes import Items, RandomPlans, Ranks, alone, flat


@pytest.mark.parametrize("num_taken", slow_but([0, 3], [0, 1, 3, 5]))
@pytest.mark.parametrize("persistent", slow_but([None, True], [None, False, True]))
def test_a_run_goes_on_where_it_was_on_another_number_of_ranks(num_taken, persistent):
    """Every sample of the epoch once, then the next epoch that the unbroken run would have."""
    workers = {} if persistent is None else {"num_workers": 1, "persistent_workers": persistent}

    def make(rank):
        generator = torch.Generator().manual_seed(11)
        return DataLoader(Items(29), shuffle=True, generator=generator, **workers)

    unbroken = Ranks(make, RandomPlans(1, 6, tail=5), world_size=1, size=6)
    before = Ranks(make, RandomPlans(2, 6, tail=5, seed=1), world_size=2, size=6)
    after = Ranks(make, RandomPlans(3, 6, tail=5, seed=2), world_size=3, size=6)
    with unbroken, before, after:
        first, second = [[flat(step) for step in unbroken.counted()] for _ in range(2)]
        steps = before.counted()
        start = [flat(next(steps)) for _ in range(num_taken)]
        states = [loader.state_dict() for loader in before.loaders]
        steps.close()

        torch.manual_seed(99)
        for loader in after.loaders:
            loader.load_state_dict(states[-1])
        rest = [flat(step) for step in after.counted()]
        following = [flat(step) for step in after.counted()]

    assert states[0] == states[1]
    done = [*start, *rest, *following][: len(first) + len(second)]
    assert [sorted(step) for step in done] == [sorted(step) for step in first + second]
    assert after.listeners[0].calls[0][1] == num_taken


def test_a_checkpoint_is_of_plain_values(tmp_path):
    """It loads with `weights_only=True`, which admits no class of ours."""
    loader = alone(DataLoader(Items(8), batch_size=2, shuffle=True))
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")

    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()


def test_an_order_that_cannot_be_drawn_again_is_refused():
    """Rather than to skip some samples and repeat others."""
    loader = alone(DataLoader(Items(4), batch_size=2, sampler=[0, 1, 2, 3]))
    next(iter(loader))
    other = alone(DataLoader(Items(4), batch_size=2, sampler=[3, 1, 2, 0]))
    other.load_state_dict(loader.state_dict())

    with pytest.raises(RuntimeError, match="did not draw the order of the checkpoint again"):
        next(iter(other))


def test_drawing_an_order_again_leaves_the_models_generator_alone():
    """What dropout draws after a resume does not depend on where in the epoch that was."""
    loader = alone(DataLoader(Items(8), batch_size=2, shuffle=True))
    next(iter(loader))
    other = alone(DataLoader(Items(8), batch_size=2, shuffle=True))
    other.load_state_dict(loader.state_dict())
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()  # as for the seed of workers
    expected = torch.get_rng_state()

    torch.manual_seed(3)
    next(iter(other))
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_checkpoint_of_another_global_batch_is_refused():
    """The position counts in steps."""
    state = alone(DataLoader(Items(8), batch_size=2)).state_dict()

    with pytest.raises(ValueError, match="global batch size 4, got 2"):
        alone(DataLoader(Items(8), batch_size=4)).load_state_dict(state)


class Numbered:
    """An order for each epoch's number, which it is told."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 12

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(12, generator=generator).tolist())

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_after_a_finished_epoch_the_sampler_keeps_what_it_was_told():
    """By the script, before the first loop after a restart."""
    orders = []
    loader = alone(DataLoader(Items(12), batch_size=4, sampler=Numbered()))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        orders.append([batch[0].tolist() for batch in loader])
        if epoch == 0:
            state = loader.state_dict()
    again = alone(DataLoader(Items(12), batch_size=4, sampler=Numbered()))
    again.load_state_dict(state)
    again.sampler.set_epoch(1)

    assert orders[0] != orders[1]
    assert [batch[0].tolist() for batch in again] == orders[1]


def trained_order(state, form, num_steps):
    """Train so many steps in a loop of a form; return the samples used, and the state after it."""
    data = TensorDataset(torch.arange(40, dtype=torch.float32).unsqueeze(1))
    model, used = torch.nn.Linear(1, 1), []
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, DataLoader(data, batch_size=4))
        if state is not None:
            loader.load_state_dict(state)

        def train(x):
            model(x).mean().backward()
            used.extend(x.flatten().int().tolist())

        return used, FORMS[form](loader, train, num_steps)


def saved_at_the_top(loader, train, num_steps):
    """Before the batch at hand is trained on."""
    for number, (x,) in enumerate(loader):
        if number == num_steps:
            return loader.state_dict()
        train(x)


def fetched_after_the_step(loader, train, num_steps):
    """nanoGPT's order: the next batch is fetched, and then a checkpoint is written."""
    batches = iter(loader)
    (x,) = next(batches)
    for _ in range(num_steps):
        train(x)
        (x,) = next(batches)
    return loader.state_dict()


def left_with_a_batch(loader, train, num_steps):
    """The loop is over, and the batch that it had fetched was never used."""
    fetched_after_the_step(loader, train, num_steps)
    return loader.state_dict()


def left_two_ahead(loader, train, num_steps):
    """Likewise, with two batches fetched ahead."""

    def loop():
        batches = iter(loader)
        ahead = [next(batches), next(batches)]
        for _ in range(num_steps):
            ahead.append(next(batches))
            train(ahead.pop(0)[0])

    loop()
    return loader.state_dict()


def fetched_across_epochs(loader, train, num_steps):
    """Likewise, in a loop over epochs without an end."""
    batches = chain.from_iterable(repeat(loader))
    ahead = [next(batches), next(batches)]
    for _ in range(num_steps):
        ahead.append(next(batches))
        train(ahead.pop(0)[0])
    return loader.state_dict()


def looked_inside(loader, train, num_steps):
    """After a look at a batch from within the loop, as for a picture of it."""
    for number, (x,) in enumerate(loader, 1):
        train(x)
        if number == num_steps:
            next(iter(loader))
            return loader.state_dict()


def saved_before_the_first(loader, train, num_steps):
    """At the top of the first step of a process, as `if step % 100 == 0` has it."""
    for number, (x,) in enumerate(loader):
        if not number:
            state = loader.state_dict()
        if number == num_steps:
            break
        train(x)
    return state


FORMS = {
    form.__name__.replace("_", " "): form
    for form in (
        saved_at_the_top,
        saved_before_the_first,
        fetched_after_the_step,
        left_with_a_batch,
        left_two_ahead,
        fetched_across_epochs,
        looked_inside,
    )
}


@pytest.mark.parametrize("form", [form for form in FORMS if "first" not in form])
def test_a_batch_that_was_fetched_and_not_used_comes_again(form):
    """Wherever in its loop a script writes its checkpoint."""
    first, state = trained_order(None, form, 3)
    rest, _ = trained_order(state, form, 5)

    assert first + rest == list(range(32))


def test_what_was_fetched_ahead_before_an_epochs_end_comes_again():
    """Though a batch of the next epoch has been fetched as well."""
    first, state = trained_order(None, "fetched across epochs", 9)
    rest, _ = trained_order(state, "fetched across epochs", 3)

    assert first + rest == [*range(40), *range(8)]


def test_the_first_batch_of_a_process_comes_again():
    """Of a run that begins, and of one that goes on: both wrote a state before it was used."""
    first, state = trained_order(None, "saved at the top", 3)
    again, early = trained_order(state, "saved before the first", 2)
    rest, _ = trained_order(early, "saved at the top", 5)
    begun, empty = trained_order(None, "saved before the first", 2)

    assert first + rest == list(range(32))
    assert again == rest[:8]
    assert trained_order(empty, "saved at the top", 2)[0] == begun == list(range(8))


def test_a_batch_at_hand_is_that_of_its_own_loader():
    """Of two in turn: the first was used up, and the second has not begun."""
    data = TensorDataset(torch.ones(8, 1))
    model = torch.nn.Linear(1, 1)
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        model, one, other = balancer.prepare(
            model, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4)
        )
        for (x,) in one:
            model(x).mean().backward()
        batches = iter(other)
        next(batches)

        assert one.state_dict()["steps_taken"] == 2
        assert other.state_dict()["steps_taken"] == 0
        assert one.state_dict()["steps_of_run"] == other.state_dict()["steps_of_run"] == 2
