"""What is saved comes back whole, or not at all and with a word."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from evenstep.exceptions import CheckpointError, EvenstepWarning
from evenstep.torch import Checkpoint

from .checkpoints import Training, plain_net, same


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with checkpoints of the steps 2 and 4, and what they hold."""
    training = Training(tmp_path_factory.mktemp("two"))
    held = []
    for first in (0, 2):
        training.run(first, first + 2)
        training.checkpoint.save(first + 2)
        held.append(training.everything())
    return training.checkpoint._root, held


def copied(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path):
    """Parameters, buffers, moments and schedule, and parameters that never had a gradient."""
    unbroken = Training(tmp_path / "a")
    unbroken.run(0, 3)
    unbroken.checkpoint.save(3)
    unbroken.run(3, 7)

    resumed = Training(tmp_path / "a", seed=1)
    assert resumed.checkpoint.load() == 3
    resumed.run(3, 7)
    assert same(resumed.everything(), unbroken.everything())


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path):
    """The first start of a run says so, and leaves the model alone."""
    training = Training(tmp_path / "none" / "yet")
    before = training.everything()

    assert training.checkpoint.load() is None
    assert same(training.everything(), before)


def test_the_newest_stay(tmp_path):
    """As many as were asked for, and nothing else."""
    training = Training(tmp_path, keep=2)
    for step in (1, 5, 30):
        training.checkpoint.save(step)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000030"]


def test_a_save_that_died_half_way_is_as_if_it_had_never_begun(two, tmp_path):
    """What it left is no checkpoint, and the next save clears it away."""
    root = copied(two[0], tmp_path / "root")
    (root / "step-00000004").rename(root / ".partial-00000004")
    (root / ".partial-00000004" / "manifest.json").unlink()
    training = Training(root, seed=1)

    assert training.checkpoint.load() == 2
    assert same(training.everything(), two[1][0])
    training.checkpoint.save(3)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000002", "step-00000003"]


damage = st.tuples(
    st.integers(0, 3), st.floats(0, 1, exclude_max=True), st.sampled_from([*range(8), "cut"])
)


def spoil(folder, harm):
    """Flip one bit of one file, or cut it there."""
    which, where, how = harm
    file = sorted(folder.iterdir())[which]
    content = bytearray(file.read_bytes())
    place = int(where * len(content))
    if how == "cut":
        del content[place:]
    else:
        content[place] ^= 1 << how
    file.write_bytes(content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(harm=damage)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(two, tmp_path, harm):
    """Whichever bit was flipped, wherever a file was cut: a warning, and all of the older one."""
    root = copied(two[0], tmp_path / "root")
    spoil(root / "step-00000004", harm)
    training = Training(root, seed=1)

    with pytest.warns(EvenstepWarning, match="step-00000004"):
        assert training.checkpoint.load() == 2
    assert same(training.everything(), two[1][0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(newer=damage, older=damage)
def test_if_all_are_damaged_the_error_names_a_file(two, tmp_path, newer, older):
    """And the model is left as it was."""
    root = copied(two[0], tmp_path / "root")
    spoil(root / "step-00000004", newer)
    spoil(root / "step-00000002", older)
    training = Training(root, seed=1)
    before = training.everything()

    with (
        pytest.warns(EvenstepWarning, match="damaged|missing"),
        pytest.raises(CheckpointError, match="holds no checkpoint that can be loaded") as caught,
    ):
        training.checkpoint.load()
    assert caught.value.path.parent == root / "step-00000002"
    assert same(training.everything(), before)


@pytest.mark.parametrize(
    "name", ["plain.pt", ".metadata", "index.pt", "__0_0.distcp", "manifest.json"]
)
def test_a_missing_file_is_named(two, tmp_path, name):
    """Any of them."""
    root = copied(two[0], tmp_path / "root")
    (root / "step-00000004" / name).unlink()

    with pytest.warns(EvenstepWarning, match=f"{name}` is missing"):
        assert Training(root).checkpoint.load() == 2


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(two, tmp_path):
    """And a damaged one of a later step does not stand in the way."""
    root = copied(two[0], tmp_path / "root")
    spoil(root / "step-00000004", (0, 0.5, 1))
    training = Training(root)
    with pytest.warns(EvenstepWarning):
        training.checkpoint.load()
    training.run(2, 3)
    training.checkpoint.save(3)

    again = Training(root, seed=1)
    assert again.checkpoint.load() == 3
    training.run(3, 4)
    training.checkpoint.save(4)
    training.checkpoint.save(4)
    assert again.checkpoint.load() == 4
    assert same(again.everything(), training.everything())


def test_a_checkpoint_known_to_be_damaged_does_not_count(two, tmp_path):
    """It goes before any good one does."""
    root = copied(two[0], tmp_path / "root")
    spoil(root / "step-00000004", (0, 0.5, 1))
    training = Training(root)
    with pytest.warns(EvenstepWarning):
        assert training.checkpoint.load() == 2
    training.checkpoint.save(6)

    assert sorted(path.name for path in root.iterdir()) == ["step-00000002", "step-00000006"]


def sealed(folder):
    """Make the checksums fit what the files hold now, as a forger would."""
    written = json.loads((folder / "manifest.json").read_text())
    for name in written["body"]["files"]:
        written["body"]["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    text = json.dumps(written["body"], sort_keys=True)
    written["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(written))


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return exec, ("raise ArithmeticError('it ran')",)


def test_an_index_that_asks_for_code_is_refused(two, tmp_path):
    """Even with the right checksums: torch's own reader would run it."""
    root = copied(two[0], tmp_path / "root")
    torch.save(Bomb(), root / "step-00000004" / "index.pt")
    sealed(root / "step-00000004")

    with pytest.raises(CheckpointError, match=r"index.pt` cannot be read: .*GLOBAL .*exec"):
        Training(root).checkpoint.load()


def test_plain_values_beside_the_tensors_are_no_way_in_either(two, tmp_path):
    """Settings of the optimizer are pickles too, in torch's own files."""
    from torch.distributed.checkpoint.state_dict_saver import save

    root = copied(two[0], tmp_path / "root")
    training = Training(root)
    states = training.checkpoint._tensors._states()
    states["optimizer"]["param_groups"][0]["eps"] = Bomb()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: one process, and the folder is not empty
        index = save(states, checkpoint_id=root / "step-00000004", no_dist=True)
    training.checkpoint._tensors.save_index(root / "step-00000004", index)
    sealed(root / "step-00000004")

    with pytest.raises(CheckpointError, match=r"(?s)does not fit this model and optimizer.*exec"):
        training.checkpoint.load()


def test_plain_values_load_as_weights_only(two):
    """The file of everything that is no tensor holds no class of ours."""
    held = torch.load(two[0] / "step-00000004" / "plain.pt", weights_only=True)

    assert held["step"] == 4
    assert held["part.schedule"]["last_epoch"] == 4


def test_torch_reads_the_folder_too(two):
    """It is one of `torch.distributed.checkpoint`, under the names of the plain model."""
    from torch.distributed.checkpoint import FileSystemReader

    saved = FileSystemReader(two[0] / "step-00000004").read_metadata().state_dict_metadata
    assert {"model.first.weight", "optimizer.state.last.bias.exp_avg"} <= saved.keys()


def test_a_step_that_was_passed_is_not_saved_over(two, tmp_path):
    """A new run in an old folder would lose one of the two."""
    root = copied(two[0], tmp_path / "root")

    with pytest.raises(CheckpointError, match=r"newer than the step 1 .*a folder of its own"):
        Training(root).checkpoint.save(1)


@pytest.mark.parametrize(
    "model",
    [
        plain_net(),
        nn.Sequential(*plain_net(), nn.Linear(1, 1)),
        nn.Sequential(nn.Linear(5, 8)).double(),  # all that it has would fit
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, model):
    """With missing, lacking or differently shaped parameters, none of which is touched."""
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    Checkpoint(tmp_path, model=other).save(1)
    before = [p.clone() for p in model.parameters()]

    with pytest.raises(CheckpointError, match=r"step-00000001` (is of another|does not fit)"):
        Checkpoint(tmp_path, model=model).load()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_part_that_was_not_saved_is_an_error_and_one_not_asked_for_a_warning(two, tmp_path):
    """Neither passes in silence."""
    training = Training(copied(two[0], tmp_path / "root"))
    parts = {"model": training.model, "optimizer": training.optimizer}
    more = {"schedule": training.schedule, "scaler": torch.amp.GradScaler("cpu")}

    with pytest.raises(CheckpointError, match=r"saved without \['scaler'\]"):
        Checkpoint(training.checkpoint._root, **parts, others=more).load()
    with pytest.warns(EvenstepWarning, match=r"holds \['schedule'\] as well"):
        Checkpoint(training.checkpoint._root, **parts).load()


def test_several_models_go_by_name(tmp_path):
    """As in a GAN, each with its optimizer."""
    models = {"g": plain_net(), "d": plain_net()}
    Checkpoint(tmp_path, model=models, optimizer=optimizers(models)).save(1)
    others = {"g": plain_net(), "d": plain_net()}
    Checkpoint(tmp_path, model=others, optimizer=optimizers(others)).load()

    for name in models:
        assert all(map(torch.equal, models[name].parameters(), others[name].parameters()))


def optimizers(models):
    kinds = {"g": torch.optim.AdamW, "d": torch.optim.SGD}
    return {name: kinds[name](model.parameters(), lr=0.1) for name, model in models.items()}


def test_a_folder_stays_where_it_was_named(tmp_path, monkeypatch):
    """Whatever folder the script works in later."""
    monkeypatch.chdir(tmp_path)
    training = Training("runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    training.run(0, 1)

    assert training.checkpoint.save(1).parent == tmp_path / "runs"
