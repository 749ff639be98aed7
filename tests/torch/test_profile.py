"""A profile measures every rank by itself, leaves no trace, and the run begins balanced."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from evenstep import Cluster, allocate
from evenstep.exceptions import EvenstepWarning
from evenstep.policies import Lbb, LbBsp2018
from evenstep.testing import run_workers
from evenstep.timemodels import ClusterProfile
from evenstep.torch import Bounds
from evenstep.torch._profile._file import write_profile

from .profiles import CASES, MODEL, PER_SAMPLE_S, alone, mistakes, runs, twice


@pytest.fixture(scope="module")
def pairs():
    """Each case without a profile and with one, by rank."""
    return run_workers(2, twice)


@pytest.mark.cluster
@pytest.mark.parametrize("case", CASES)
def test_training_goes_as_without_a_profile(pairs, case):
    """Bit by bit: parameters, buffers, losses, random numbers; each sample once an epoch."""
    for rank in (0, 1):
        without, with_ = pairs[rank][case]

        assert with_["losses"] == without["losses"]
        assert with_["seen"] == without["seen"]
        assert with_["draws"] == without["draws"]
        for name, value in without["state"].items():
            assert torch.equal(with_["state"][name], value), name
    assert sorted(pairs[0][case][1]["seen"] + pairs[1][case][1]["seen"]) == list(range(36))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks of unlike speeds had after each of the runs."""
    return run_workers(2, runs, str(tmp_path_factory.mktemp("profiles")))


@pytest.mark.cluster
def test_every_rank_is_measured_by_itself(found):
    """The fast one's times are its own, and all ranks hold all times."""
    first, second = (rank["first"]["profile"] for rank in found)
    least_s = 0.002 + first.sizes[:, np.newaxis] * PER_SAMPLE_S

    assert first.to_json() == second.to_json()
    assert first.sizes[[0, -1]].tolist() == [1, 40]
    assert (first.seconds >= least_s).all()
    assert (first.seconds[-3:, 0] < least_s[-3:, 1]).all()  # and no waiting for the slow one
    assert first.peak_bytes.max() == 0
    assert first.model == MODEL


@pytest.mark.cluster
def test_the_first_step_is_balanced(found):
    """Under a policy that knows nothing of profiles, where a run without begins with 20 and 20."""
    fast, slow = found[0]["first"]["sizes"]

    assert 0.002 + slow * PER_SAMPLE_S[1] < 0.6 * (0.002 + 20 * PER_SAMPLE_S[1])
    assert fast + slow == 40
    assert found[0]["first"]["restored"] == ["rehearsed"]


@pytest.mark.cluster
def test_the_next_run_begins_balanced_from_the_file_or_the_state(found):
    """Without a forward, by host and device; a loaded state counts on rank 0."""
    for rank in (0, 1):
        run = found[rank]["found"]

        assert run["profiled"] == []
        assert run["profile"].to_json() == found[rank]["first"]["profile"].to_json()
    for name in ("found", "restored"):
        assert found[0][name]["sizes"] == found[0]["first"]["sizes"]
        assert found[0][name]["restored"] == ["rehearsed"]


@pytest.mark.cluster
def test_a_worker_that_the_file_does_not_have_is_measured_alone(found):
    """The others are not needed for it, not even for DDP's buffers."""
    first, second = (rank["partly"] for rank in found)

    assert first["profiled"] == []
    assert len(second["profiled"]) > 24
    before = found[0]["first"]["profile"].profiles[0]
    assert first["profile"].profiles[0].sizes.tolist() == before.sizes.tolist()
    assert first["profile"].profiles[0].seconds.tolist() == before.seconds.tolist()
    assert first["sizes"][0] > first["sizes"][1]


@pytest.mark.cluster
def test_memory_that_runs_out_ends_a_ranks_sizes(found):
    """The other goes on to the end, and the plan keeps within what fitted."""
    short = found[0]["short"]
    profile = short["profile"]
    fitted = profile.profiles[0].sizes[-1]

    assert fitted <= 14 < profile.out_of_memory[0]
    assert profile.out_of_memory[1] == 0
    assert np.isnan(profile.seconds[profile.sizes > 14, 0]).all()
    assert np.isfinite(profile.seconds[:, 1]).all()
    assert short["sizes"] == (fitted, 40 - fitted)


@pytest.mark.cluster
def test_a_rank_that_fails_stops_all_of_them():
    """With its own error there, and its words elsewhere: nobody waits for ever."""
    first, second = run_workers(2, mistakes)

    assert (
        "RuntimeError: Rank 1 could not be profiled. It ended with a KeyError"
        in (first["one fails"])
    )
    assert second["one fails"] == "KeyError: 'labels'"
    assert "RuntimeError: Memory ran out at 1 samples, so that only []" in first["no room"]
    assert "RuntimeError: Rank 0 could not be profiled" in second["no room"]
    assert "a model sharded by FSDP, whose forward is a collective" in first["sharded"]
    assert "static_graph=True)`, which would learn it from the profile" in first["static graph"]


def test_a_profile_makes_policies(found):
    """The cubic of LBB and LB-BSP's curve solve the same cluster to about the same split."""
    profile = found[0]["first"]["profile"]
    cluster = Cluster(2, 40)
    best = allocate(profile.best_fit().times, cluster)

    for policy in (Lbb(profile=profile.cubic()), LbBsp2018(profile=profile.piecewise())):
        assert abs(policy.init(cluster).batch_size - best).max() <= 3


class Reader:
    """Memory that is read: 100 bytes a sample and 1000 for the model."""

    def __init__(self):
        self.peak = 0

    def capacity_bytes(self):
        return 20_000

    def peak_bytes(self):
        return self.peak

    def reset(self):
        self.peak = 1000


def test_one_process_is_profiled_too():
    """Each size once to warm up and as often as asked; memory where somebody reads it."""
    profile, sizes = alone(memory=Reader(), repeats=2)

    assert profile.sizes.tolist() == sorted({*sizes})
    assert profile.sizes[[0, -1]].tolist() == [1, 16]
    assert {sizes.count(size) for size in sizes} == {3}
    assert profile.peak_bytes[:, 0].tolist() == (1000 + 100 * profile.sizes).tolist()
    assert profile.capacity_bytes.tolist() == [20_000]


def test_what_was_asked_for_is_measured():
    """The sizes, in the order of their size, with more samples than the data set has."""
    profile, sizes = alone(sizes=[40, 8], repeats=1)

    assert sizes == [8, 8, 40, 40]
    assert profile.sizes.tolist() == [8, 40]
    assert profile.seconds.shape == (2, 1)


def test_the_default_sizes_keep_within_bounds():
    """Whole granules, none above the cap, none below what BatchNorm needs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    profile, _ = alone(model=model, bounds=Bounds(max=9, granularity=3))

    assert profile.sizes.tolist() == [3, 6, 9]
    assert alone(model=model)[0].sizes[0] == 2


def test_forwards_of_one_size_vary_in_number():
    """As they will in training, where nothing but the count differs."""
    profile, sizes = alone(bounds=Bounds(vary="count", granularity=4), repeats=1)

    assert set(sizes) == {4}
    assert profile.sizes.tolist() == [4, 8, 12, 16]
    assert len(sizes) == 2 * (1 + 2 + 3 + 4)


def test_a_file_of_another_model_or_of_other_sizes_is_measured_anew(tmp_path):
    """And taken as it is where it has all that was asked for."""
    path = tmp_path / "profile.json"
    kept, _ = alone(path=path)

    assert ClusterProfile.from_json(path.read_text()).to_json() == kept.to_json()
    assert alone(path=path)[1] == []
    assert alone(path=path, sizes=[1, 16])[1] == []
    assert alone(path=path, sizes=[1, 17])[1] != []
    assert alone(path=path, sizes=[1, 17])[1] == []
    assert alone(path=path, sizes=[1, 17], model=nn.Linear(4, 3))[1] != []


def test_a_file_that_cannot_be_written_is_warned_about(tmp_path):
    """Training goes on without."""
    (tmp_path / "file").write_text("")

    with pytest.warns(EvenstepWarning, match="so the next run measures anew"):
        write_profile(tmp_path / "file" / "profile.json", alone(sizes=[1, 2])[0])


class WhereFrom(Dataset):
    """Tells which process a sample was fetched in, after drawing at random."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        torch.rand(2)
        return torch.full((4,), -1.0 if get_worker_info() is None else 1.0)


def test_samples_come_from_a_loader_worker_where_there_are_any():
    """As in training, and neither it nor anything else moves this process' random state."""
    stock = DataLoader(WhereFrom(), batch_size=16, num_workers=2)
    model, marks = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), []
    torch.manual_seed(3)
    state = torch.get_rng_state()

    def closure(batch):
        marks.append(batch.min().item())
        return model(batch).mean()

    alone(closure, stock=stock, model=model, sizes=[1, 16])

    assert set(marks) == {1.0}
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_can_be_given():
    """As the data set has them: they are collated, and each use is a copy."""
    given = [{"x": torch.ones(4), "drop": 1}, {"x": torch.zeros(4), "drop": 2}]

    def collate(samples):
        for sample in samples:
            del sample["drop"]  # as collators of libraries do
        return [torch.stack([sample["x"] for sample in samples])]

    stock = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=16, collate_fn=collate)
    _, sizes = alone(stock=stock, samples=given, sizes=[1, 5], repeats=1)

    assert sizes == [1, 1, 5, 5]
    assert [sorted(sample) for sample in given] == [["drop", "x"]] * 2
