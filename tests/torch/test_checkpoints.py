"""What was saved comes back, whoever saved it, on any number of ranks; training stays as it is."""

from __future__ import annotations

from functools import cache
from itertools import chain

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from evenstep.exceptions import CheckpointError
from evenstep.testing import run_workers
from evenstep.torch import Checkpoint

from .._tiers import slow_but
from .checkpoint_runs import BUFFERS, FLOATS, OPTIMIZERS, Kind, Run, room, same
from .checkpoints import apart, bytes_told, plain_net, refused_on_one, sharded, unwritten
from .dcp_runs import NUM_SAMPLES, gone_on, refusals, saved, unbroken

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
kinds = st.builds(
    Kind,
    shapes=st.lists(shapes, min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(FLOATS),
    buffers=st.lists(st.tuples(shapes, st.sampled_from(BUFFERS)), max_size=2).map(tuple),
    optimizer=st.sampled_from(OPTIMIZERS),
    in_epoch=st.integers(0, 9).map(lambda drawn: drawn == 9),
)
tensors = st.builds(
    lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    shapes,
    st.sampled_from(FLOATS + BUFFERS),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars | tensors | st.binary(min_size=1),  # torch refuses empty ones, and so does `save`
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=settings().max_examples // 2)  # a load takes 10 ms
@given(
    kind=kinds,
    value=values,
    world_size=st.integers(0, 5),
    step=st.integers(0, 10**15 - 1),
    seed=st.integers(0, 99),
)
def test_what_was_saved_comes_back(kind, value, world_size, step, seed):
    """Bit by bit, from any number of ranks, or from `save` itself (0), into a run elsewhere."""
    with room() as root:
        saved = Run(root, kind).go(seed, value)
        if world_size:
            saved.write(step, world_size=world_size, seed=seed)
        else:
            saved.checkpoint.save(step)
        loaded = Run(root, kind).go(seed + 1) if seed % 3 else Run(root, kind)

        assert loaded.checkpoint.load() == step
        assert same(loaded.everything(), saved.everything())
        assert same(loaded.held.value, value)


@pytest.mark.cluster
@pytest.mark.parametrize(("before", "after"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_any_world_size_and_wrapping_loads_what_another_saved(tmp_path, before, after):
    """Sharded over 3 and whole on 2, or the other way round: the same parameters and moments."""
    folder = str(tmp_path)
    saved = run_workers(3 if before == "fsdp" else 2, sharded, folder, 5, before)
    loaded = run_workers(2 if before == "fsdp" else 3, sharded, folder, None, after)

    for step, tensors in loaded:
        assert step == 5
        assert all(map(torch.equal, tensors, saved[0][1]))


@pytest.mark.cluster
@pytest.mark.parametrize("error", [ValueError("another batch"), KeyError("gone")])
def test_what_one_rank_refuses_none_loads(tmp_path, error):
    """All of them raise what it was, and where; none waits, and none has a part of it."""
    kind = "ValueError" if isinstance(error, ValueError) else "CheckpointError"
    for message, unchanged in run_workers(2, refused_on_one, str(tmp_path), error, timeout_s=60):
        assert message.startswith(kind)
        assert f"on rank 1, {type(error).__name__}: {error}" in message
        assert unchanged


@pytest.mark.cluster
def test_folders_that_are_not_shared_are_noticed(tmp_path):
    """Before anything is trusted to them, on every rank."""
    for message in run_workers(2, apart, str(tmp_path)):
        assert "is not the same folder on all ranks: rank 1 does not see" in message


@pytest.mark.cluster
def test_an_index_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    """As on a full disk: rank 0 alone writes it, and the others would wait for rank 0."""
    for message in run_workers(2, unwritten, str(tmp_path), timeout_s=60):
        assert "index.pt" in message
        assert "Is a directory" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cluster
def test_what_rank_zero_writes_is_not_gathered(tmp_path):
    """It is alike on all ranks, and may be as large as the model: each would hold all of them."""
    assert max(run_workers(2, bytes_told, str(tmp_path), timeout_s=60)) < 10_000


class Secretive:
    """Has a state of its own kind."""

    def state_dict(self):
        return {"me": self}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_state_that_would_not_load_is_refused_when_it_is_saved(tmp_path):
    """Not after the crash."""
    checkpoint = Checkpoint(tmp_path, model=plain_net(), others={"mine": Secretive()})

    with pytest.raises(ValueError, match=r"Checkpoint\(mine=...\)` must have a state of plain"):
        checkpoint.save(1)
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_would_not_load_is_refused_when_it_is_saved(tmp_path):
    """The optimizer's groups may hold anything."""
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["owner"] = Secretive()

    with pytest.raises(
        ValueError, match=r"Checkpoint\(optimizer=...\)` must have a state of plain"
    ):
        Checkpoint(tmp_path, model=model, optimizer=optimizer).save(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, r"Checkpoint\(keep=...\)` must be at least 1, got 0"),
        ({"model": "gpt"}, r"Checkpoint\(model=...\)` must be one Module"),
        ({"optimizer": 3}, r"Checkpoint\(optimizer=...\)` must be one Optimizer"),
        ({"loader": object()}, r"Checkpoint\(loader=...\)` must have `state_dict`"),
        ({"others": {"loader": Secretive()}}, r"Checkpoint\(others=...\)` must use names"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, arguments, message):
    """At once, with the argument's name."""
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path, **{"model": plain_net(), **arguments})


def test_a_bucket_is_no_folder():
    """It would become a local folder `s3:`."""
    with pytest.raises(ValueError, match="must be a folder of a file system"):
        Checkpoint("s3://bucket/runs", model=plain_net())


def test_a_negative_step_is_refused(tmp_path):
    """Names of folders sort by it."""
    with pytest.raises(ValueError, match=r"Checkpoint.save\(step\)` must be at least 0, got -1"):
        Checkpoint(tmp_path, model=plain_net()).save(-1)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, bool])
def test_a_step_may_be_any_integer(tmp_path, kind):
    """Of NumPy, in a tensor, a truth value: what is saved can be found and loaded."""
    checkpoint = Checkpoint(tmp_path, model=plain_net())
    assert checkpoint.save(kind(1)).name == "step-00000001"
    assert checkpoint.load() == 1


@pytest.mark.parametrize(
    ("step", "rule"), [(2.0, "an integer, got 2.0"), (10**15, "at most 9{15}")]
)
def test_a_step_that_would_not_be_found_is_refused_when_it_is_saved(tmp_path, step, rule):
    """Not after the crash."""
    with pytest.raises(ValueError, match=rf"Checkpoint.save\(step\)` must be {rule}"):
        Checkpoint(tmp_path, model=plain_net()).save(step)
    assert list(tmp_path.iterdir()) == []


class Closureless(torch.optim.SGD):
    """Steps as many a research optimizer does."""

    def step(self):
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Closureless])
def test_an_optimizer_that_would_not_load_is_refused(tmp_path, kind):
    """Not after the crash. Among the others it is saved and loaded."""
    saved, loaded = ((net, kind(net.parameters(), lr=0.1)) for net in (plain_net(), plain_net()))
    with pytest.raises(ValueError, match=rf"must be loadable: .*, got {kind.__name__}.step\("):
        Checkpoint(tmp_path, model=saved[0], optimizer=saved[1])

    saved[1].param_groups[0]["lr"] = 0.5
    for save, (model, optimizer) in ((True, saved), (False, loaded)):
        checkpoint = Checkpoint(tmp_path, model=model, others={"optimizer": optimizer})
        checkpoint.save(1) if save else checkpoint.load()
    assert loaded[1].param_groups[0]["lr"] == 0.5


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    """With the system's own reason."""
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(CheckpointError, match=r"file/c/.*Not a directory"):
        Checkpoint(tmp_path / "file" / "c", model=plain_net()).save(1)


def adamw(models):
    return {name: torch.optim.AdamW(models[name].parameters(), lr=0.1) for name in models}


@pytest.mark.parametrize("late", [False, True])
def test_a_save_before_the_first_step_changes_nothing(tmp_path, late):
    """Adam's count of steps begins with the first one, of one optimizer or of the second."""
    ends = []
    for saves in (False, True):
        torch.manual_seed(0)
        models = {"g": plain_net(), "d": plain_net()}
        adam = adamw(models)
        first = {"g", "d"} if not late else {"g"}
        if late:
            stepped(models, adam, first)
        if saves:
            Checkpoint(tmp_path, model=models, optimizer=adam).save(0)
            assert not adam["d"].state
            assert all(each.grad is None for each in models["d"].parameters())
        for _ in range(3):
            stepped(models, adam, {"g", "d"})
        ends.append([p for name in models for p in models[name].parameters()])
    assert all(map(torch.equal, *ends))

    torch.manual_seed(1)
    models = {"g": plain_net(), "d": plain_net()}
    adam = adamw(models)
    assert Checkpoint(tmp_path, model=models, optimizer=adam).load() == 0
    if late:
        assert all(values["step"] == 1 for values in adam["g"].state.values())
    assert not adam["d"].state
    for _ in range(3):
        stepped(models, adam, {"g", "d"})
    assert all(map(torch.equal, ends[0], [p for name in models for p in models[name].parameters()]))


def stepped(models, optimizers, names):
    """Do one step of some of the models."""
    for name in sorted(names):
        x = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5)
        models[name](x).square().mean().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()


class Picky:
    """Holds a number; takes up none, or fails."""

    def __init__(self, error=None):
        self.held, self.error = 0, error

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        if self.error is not None and state["held"]:
            raise self.error
        self.held = state["held"]


@pytest.mark.parametrize("error", [ValueError("another batch"), KeyError("gone"), None])
def test_what_is_refused_half_way_changes_nothing(tmp_path, error):
    """Neither the model, nor the optimizer, nor the parts that were first."""
    kept, lost = Picky(), Picky()
    kept.held = lost.held = 3
    saved = plain_net()
    adam = torch.optim.AdamW(saved.parameters())
    parts = {"kept": kept, "lost": lost}
    stepped({"": saved}, {"": adam}, {""})
    Checkpoint(tmp_path, model=saved, optimizer=adam, others=parts).save(1)

    model = plain_net()
    if error is None:  # the shapes are what does not fit
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    adam = torch.optim.AdamW(model.parameters())
    before = [p.clone() for p in model.parameters()]
    parts = {"kept": Picky(), "lost": Picky(error)}
    kind = ValueError if isinstance(error, ValueError) else CheckpointError
    with pytest.raises(kind, match=r"another batch|KeyError: 'gone'|does not fit"):
        Checkpoint(tmp_path, model=model, optimizer=adam, others=parts).load()
    assert all(map(torch.equal, model.parameters(), before))
    assert not adam.state
    assert parts["kept"].held == 0


class Hanging:
    """A part whose state never loads, until it is interrupted."""

    def __init__(self):
        self.num_loads = 0

    def state_dict(self):
        return {"number": 1}

    def load_state_dict(self, state):
        self.num_loads += 1
        raise KeyboardInterrupt


def test_a_part_that_was_interrupted_is_not_loaded_again(tmp_path):
    """It may have hung, and would hang once more."""
    part = Hanging()
    checkpoint = Checkpoint(tmp_path, model=plain_net(), others={"part": part})
    checkpoint.save(0)

    with pytest.raises(KeyboardInterrupt):
        checkpoint.load()

    assert part.num_loads == 1


KINDS = [(kind, background) for kind in ("ddp", "fsdp2") for background in (False, True)]
plain = cache(unbroken)


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "background"), slow_but([("ddp", True)], KINDS))
def test_a_run_goes_on_from_a_folder_of_torchs_own(tmp_path, kind, background):
    """Saved on 3 ranks within an epoch, gone on with on 2: samples and parameters of one process.

    What was learnt of the workers comes along, from rank 0 alone.
    """
    before = run_workers(3, saved, str(tmp_path), kind, background)
    after = run_workers(2, gone_on, str(tmp_path), kind)

    steps = [list(chain(*parts)) for parts in zip(*before, strict=True)]
    steps += [list(chain(*parts)) for parts in zip(*(found for found, _, _ in after), strict=True)]
    expected, parameters = plain()
    assert [sorted(step) for step in steps] == [sorted(step) for step in expected]
    assert sorted(chain(*steps[:6])) == list(range(NUM_SAMPLES))
    for _, found, _ in after:
        torch.testing.assert_close(found, parameters, rtol=0, atol=1e-12)
    assert [known for _, _, known in after] == [[(True, True)], []]


@pytest.mark.cluster
def test_a_damaged_or_foreign_folder_is_refused(tmp_path):
    """By torch where files or names are missing, by the loader where its state is wrong."""
    for found in run_workers(2, refusals, str(tmp_path)):
        assert found.pop("good") == "none"
        assert found["cut short"].startswith("CheckpointException: ")
        assert "Missing key in checkpoint state_dict: loader." in found["without a loader"]
        wrong = "ValueError: `BalancedLoader.load_state_dict(state=...)` must "
        assert found["another position"].startswith(f"{wrong}come from `state_dict()`")
        assert "the file is damaged" in found["another position"]
        assert found["another batch"].startswith(f"{wrong}be of the global batch size 30, got 24.")
