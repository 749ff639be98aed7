"""The state of a loader: whole it goes on anywhere, damaged it is refused."""

from __future__ import annotations

import io
import json
from copy import deepcopy

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from evenstep.exceptions import EvenstepWarning

from .loader_fakes import FixedPlan, Items, RandomPlans, Recorder, alone, flat
from .stream_fakes import Numbers, cluster

DAMAGED = (
    "come from `state_dict\\(\\)` of such a loader, complete and unchanged|must be of|must have"
)


def indexed(length=23, size=4, seed=1, **options):
    generator = torch.Generator().manual_seed(seed)
    return alone(
        DataLoader(Items(length), batch_size=size, shuffle=True, generator=generator, **options)
    )


def stream(kind="same", size=4, **options):
    return cluster(
        lambda rank: DataLoader(Numbers(23), **options),
        FixedPlan(size),
        lambda loader, _: loader,
        kind=kind,
        world_size=1,
        size=size,
    )[0]


MAKERS = {
    "indexed": indexed,
    "same": stream,
    "sharded": lambda: stream("sharded"),
}


def after(loader, num_steps):
    """Return the state after so many steps, over several epochs if need be."""
    while num_steps > 0:
        for _ in loader:
            num_steps -= 1
            if num_steps == 0:
                return loader.state_dict()
    return loader.state_dict()


def written(state):
    """Return ``state`` as it comes back from a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def numbers(loader):
    return [(batch[0] if isinstance(batch, list) else batch).tolist() for batch in loader]


@given(
    length=st.integers(1, 40),
    size=st.integers(1, 9),
    taken=st.integers(0, 25),
    drop_last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_state_goes_on_where_it_was(length, size, taken, drop_last, seed):
    """From a file, in another process' loader: the rest of the epoch and the next one."""
    assume(length >= size or not drop_last)
    first = indexed(length, size, seed, drop_last=drop_last)
    state = written(after(first, taken))
    second = indexed(length, size, seed, drop_last=drop_last)
    second.load_state_dict(state)

    assert second.state_dict() == state == json.loads(json.dumps(state))
    unbroken = indexed(length, size, seed, drop_last=drop_last)
    whole = flat(numbers(unbroken) for _ in range(taken // len(unbroken) + 3))
    assert (
        numbers(second) + numbers(second) == whole[taken:][: len(second) * 2 - taken % len(second)]
    )


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 70)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
STATES = {
    name: [after(make(), num_taken) for num_taken in (0, 1, 3, 6, 8)]
    for name, make in MAKERS.items()
}


@st.composite
def mutilated(draw, name):
    """A state of the kind that was cut, changed or exchanged somewhere."""
    state = deepcopy(draw(st.sampled_from(STATES[name])))
    before = repr(state)
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(sorted(state) or [""]))
        value = state.get(key)
        match draw(st.sampled_from(["lose", "change", "nudge", "cut", "flip"])):
            case "lose":
                state.pop(key, None)
            case "change":
                state[key] = draw(VALUES)
            case "nudge" if type(value) is int:
                state[key] = value + draw(st.integers(-2, 2))
            case "cut" if type(value) is list:
                state[key] = value[: draw(st.integers(0, len(value)))]
            case "flip" if type(value) is list and value:
                place = draw(st.integers(0, len(value) - 1))
                value[place] = draw(st.integers(0, 255) | VALUES)
    assume(repr(state) != before)
    return state


LOADERS = {name: make() for name, make in MAKERS.items()}


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
def test_a_mutilated_state_is_refused(name, data):
    """With the documented error and nothing else, and the loader stays as it was."""
    loader = LOADERS[name]
    before = loader.state_dict()
    state = data.draw(mutilated(name))

    with pytest.raises(ValueError, match=DAMAGED):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


@pytest.mark.parametrize("name", MAKERS)
@given(foreign=VALUES | st.dictionaries(st.text(), VALUES))
def test_a_foreign_state_is_refused(name, foreign):
    """Whatever it is: a number, a text, another object's state."""
    with pytest.raises(ValueError, match=DAMAGED):
        LOADERS[name].load_state_dict(foreign)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("other", MAKERS)
def test_the_state_of_another_kind_is_refused(name, other):
    """A position in an order says nothing about a stream."""
    if name != other:
        with pytest.raises(ValueError, match="one of the kind"):
            LOADERS[name].load_state_dict(STATES[other][2])


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: indexed(size=3), "global batch size 3, got 4. With another number of ranks"),
        (lambda: indexed(length=24), "of an epoch of 24 samples in 6 steps, got one of 23"),
        (lambda: indexed(drop_last=True), "in 5 steps, got one of 23 samples after step 6"),
    ],
)
def test_a_state_of_other_data_is_refused(make, rule):
    """A position in one order is none in another."""
    with pytest.raises(ValueError, match=rule):
        make().load_state_dict(STATES["indexed"][3])


@pytest.mark.parametrize(
    ("kind", "options", "rule"),
    [
        ("same", {"size": 5}, "global_batch_size=5, as this loader has, got 4"),
        ("same", {"num_workers": 2}, "num_readers=2, as this loader has, got 1. Set"),
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_state_of_another_reading_is_refused(kind, options, rule):
    """What the order of a stream depends on has to be as back then."""
    with pytest.raises(ValueError, match=rule):
        stream(kind, **options).load_state_dict(STATES[kind][2])


def test_a_state_of_shards_is_of_as_many_ranks():
    """Each rank's shard has its own position."""

    def use(loader, _):
        loader.load_state_dict(STATES["sharded"][1])

    with pytest.raises(ValueError, match="be of 2 ranks, as shards belong to ranks, got 1"):
        cluster(
            lambda rank: DataLoader(Numbers(23)), RandomPlans(2, 4), use, kind="sharded",
            world_size=2, size=4,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_what_persistent_workers_draw_is_warned_about():
    """From the second epoch on, nobody can draw it again."""
    options = {"num_workers": 1, "persistent_workers": True}
    state = after(stream(**options), 8)

    with pytest.warns(EvenstepWarning, match="persistent_workers=True"):
        stream(**options).load_state_dict(state)


def test_what_a_loop_has_fetched_ahead_comes_again():
    """Of five batches handed out, the last two were not trained on when the state was written."""
    listener = Recorder()
    loader = alone(DataLoader(Items(20), batch_size=2), listener=listener)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    listener.ahead = 2
    resumed = alone(DataLoader(Items(20), batch_size=2))
    resumed.load_state_dict(loader.state_dict())

    assert next(iter(resumed))[0].tolist() == [6, 7]


def test_a_batch_that_is_being_handed_out_to_a_thread_comes_again():
    """A state may be written in that very moment: all batches before it were trained on."""
    taken = []

    class Interrupted(Recorder):
        """Stops a hand-out for a state to be written."""

        def begin_step(self, start):
            taken.append(loader.state_dict()["steps_taken"])
            super().begin_step(start)

    loader = alone(DataLoader(Items(8), batch_size=2), listener=Interrupted())
    for _ in range(2):
        list(loader)

    assert taken == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_state_can_be_saved_before_the_first_loop(name):
    """As by a run that is preempted while it starts."""
    for state in STATES[name]:
        loader, expected = MAKERS[name](), MAKERS[name]()
        loader.load_state_dict(state)
        again = MAKERS[name]()
        again.load_state_dict(loader.state_dict())
        expected.load_state_dict(state)

        assert numbers(again) == numbers(expected)


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_may_be_loaded_at_any_time(name):
    """Inside a loop, which goes on; the next one begins where the state says."""
    loader = MAKERS[name]()
    state = None
    for number, _ in enumerate(loader):
        if number == 1:
            state = loader.state_dict()
        if number == 3:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
    expected = MAKERS[name]()
    expected.load_state_dict(state)

    assert number == 5  # six steps, undisturbed
    assert numbers(loader) == numbers(expected)
    assert len(numbers(loader)) == 6


@pytest.mark.parametrize("name", MAKERS)
def test_after_an_epoch_the_next_one_comes(name):
    """Not the rest of the old one, of which there is none."""
    unbroken = MAKERS[name]()
    _, second = numbers(unbroken), numbers(unbroken)
    loader, resumed = MAKERS[name](), MAKERS[name]()
    numbers(loader)
    resumed.load_state_dict(written(loader.state_dict()))

    assert numbers(resumed) == second
    assert resumed.state_dict()["epochs_begun"] == 2


def test_an_adapters_own_keys_are_left_alone():
    """What a framework adds to a state does not concern the loader."""
    state = {**STATES["indexed"][1], "iteration": 3}
    loader = indexed()
    loader.load_state_dict(state)

    assert loader.state_dict() == STATES["indexed"][1]


@pytest.mark.parametrize("first", ["state", "skip"])
def test_a_state_and_a_skip_do_not_mix(first):
    """Either says where the next epoch begins; together, one of them would come an epoch late."""
    state, loader = after(indexed(), 3), indexed()
    ways = [lambda: loader.load_state_dict(state), lambda: loader.skip(2)]
    one, other = ways if first == "state" else reversed(ways)
    one()

    with pytest.raises(ValueError, match="the start of its next epoch from one call"):
        other()
