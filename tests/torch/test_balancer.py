"""What the public face does with one process, with many, and with what it cannot balance."""

import json
import re
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evenstep.events import StepMeasured
from evenstep.policies import Auto
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

from .bad_input import CASES, QUIET, batch_norm, provoke
from .runs import FAST_S, SLOW_S, blind, learn, logged_mean, micro_batches, short, with_memory


@pytest.fixture(scope="module")
def texts():
    """The error's text of every mistake, made on two ranks."""
    return run_workers(2, provoke)


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_refused_on_every_rank(texts, case):
    """With the rule, the value and the remedy; no rank is left waiting for another."""
    for rank in (0, 1):
        assert CASES[case][1] in texts[rank].get(case, "no error")


@pytest.mark.cluster
def test_local_batch_norm_is_warned_about():
    """Once, with the remedy for the device; and nobody is given a single sample."""
    messages, sizes, unconcerned = run_workers(2, batch_norm)[0]

    assert len(messages) == 1
    assert "local BatchNorm" in messages[0]
    assert "Use GroupNorm instead: SyncBatchNorm does not run on a CPU" in messages[0]
    assert sizes == (14, 2)
    assert unconcerned == []


def alone(**settings):
    """Train in this process alone; return the gradients of every step, and the balancer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x, y = torch.randn(22, 4), torch.randn(22, 2)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    gradients = []
    with Balancer(**settings) as balancer:
        model, loader = balancer.prepare(model, loader)
        for inputs, targets in loader:
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            gradients.append(model.weight.grad.clone())
    return gradients, balancer, (model, x, y)


def test_one_process_trains_as_without():
    """The same object, the same gradients bit by bit, the same number of steps."""
    gradients, balancer, (model, x, y) = alone(runtime=QUIET)

    assert len(gradients) == 3
    for step, gradient in enumerate(gradients):
        model.zero_grad()
        rows = slice(8 * step, 8 * step + 8)
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        assert torch.equal(model.weight.grad, gradient)
    assert balancer.batch_sizes == (8,)


def test_a_run_leaves_its_events(tmp_path):
    """From the start to the end, one fact a line, and hooks hear the same."""
    heard = []
    alone(runtime=Runtime(line_every=None, hooks=(heard.append,), run_dir=tmp_path))

    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]

    names = [record["event"] for record in records]
    accounts = [record for record in records if record["event"] == "StepsAccounted"]
    rest = [name for name in names if name != "StepsAccounted"]  # of one or several steps
    assert rest == ["Schema", "RunStarted", *["StepMeasured"] * 3, "RunEnded"]
    assert sum(account["num_steps"] for account in accounts) == 2
    assert records[1]["global_batch_size"] == 8
    assert records[1]["num_steps"] == 3
    assert f"torch {torch.__version__}" in records[1]["versions"]
    assert records[-1]["num_steps"] == 3
    assert len([event for event in heard if isinstance(event, StepMeasured)]) == 3


def test_the_line_for_people_appears(capfd):
    """Every so many steps, on standard error."""
    alone(runtime=Runtime(line_every=2))

    assert "evenstep step 1: batch 8, step " in capfd.readouterr().err


class Slow(Dataset):
    """Samples that take far longer to read than to train on."""

    def __len__(self):
        return 80

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.ones(4)


def test_the_line_has_the_whole_step(capfd):
    """With the wait for a slow data set: what the loop's own clock says, within a fifth."""
    handed_out_s = []
    with Balancer(runtime=Runtime(line_every=10)) as balancer:
        model, loader = balancer.prepare(nn.Linear(4, 1), DataLoader(Slow(), batch_size=8))
        for x in loader:
            handed_out_s.append(time.perf_counter())
            model(x).sum().backward()
    said = re.search(r"step ([\d.]+) s, computing ([\d.]+) s of it", capfd.readouterr().err)
    step_s, compute_s = map(float, said.groups())

    assert step_s == pytest.approx((handed_out_s[9] - handed_out_s[0]) / 9, rel=0.2)
    assert compute_s < step_s


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_reduction": "max"}, r"`Balancer\(loss_reduction=...\)` must be"),
        ({"global_batch_size": 0}, r"`Balancer\(global_batch_size=...\)` must be an integer >= 1"),
        ({"policy": "best"}, "best"),
        ({"policy": Auto}, r"`Balancer\(policy=...\)` must be a name.*not the class"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    """At once, by name."""
    with pytest.raises(ValueError, match=message):
        Balancer(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heartbeat_s": 0}, r"`Runtime\(heartbeat_s=...\)` must be positive and at most a third"),
        ({"deadline_s": 2.0}, "heartbeat_s"),
        ({"line_every": 0}, r"`Runtime\(line_every=...\)` must be at least 1, or None"),
        ({"hooks": print}, r"`Runtime\(hooks=...\)` must be a tuple of functions"),
        ({"hooks": None}, r"`Runtime\(hooks=...\)` must be a tuple of functions"),
        ({"freshness": "stale"}, r'`Runtime\(freshness=...\)` must be "newest" or "exact"'),
    ],
)
def test_a_runtime_out_of_range_is_refused(settings, message):
    """At once, by name."""
    with pytest.raises(ValueError, match=message):
        Runtime(**settings)


@pytest.mark.cluster
def test_memory_bounds_the_plan():
    """The fast worker fits 1.4 times the equal share, and its speed asks for 2.5 times."""
    sizes = run_workers(3, with_memory)[0]

    fast, *slow = max(sizes)  # not the last: beside a load, equal sizes are tried again for a while
    assert fast <= 22  # 1.4 x 16
    assert {sum(step) for step in sizes} == {48}
    assert max(fast * FAST_S, *(size * SLOW_S for size in slow)) < 16 * SLOW_S


@pytest.mark.cluster
def test_what_exceeds_a_forward_runs_as_micro_batches():
    """A cap of 5 samples a forward, local batches above it, and gradients that synchronise once."""
    for rank, (cuts, differences) in enumerate(run_workers(2, micro_batches)):
        assert max(max(step) for step in cuts) <= 5, rank
        assert max(len(step) for step in cuts) == (3, 2)[rank]
        assert max(differences) <= 1e-12


@pytest.mark.cluster
def test_a_forgotten_weight_is_warned_about():
    """Once, after a few steps that nobody weighted or measured."""
    for messages in run_workers(2, blind):
        assert len(messages) == 1
        assert "use `balancer.weight(loss)`" in messages[0]


@pytest.mark.cluster
def test_a_data_set_shorter_than_a_global_batch_is_one_short_step():
    """Three samples for four ranks: each counts once, and who has none runs a stand-in."""
    results = run_workers(4, short)

    for epoch in (0, 1):
        assert sum(steps[epoch][1] for steps in results) == 3
        assert [steps[epoch][0] for steps in results] == [1, 1, 1, 1]


@pytest.mark.cluster
def test_a_logged_mean_counts_samples():
    """Not ranks: 3 samples of 1.0 and 1 of 5.0 make 2.0."""
    assert run_workers(2, logged_mean) == [[2.0], [2.0]]


@pytest.mark.cluster
def test_a_plain_module_is_put_into_ddp():
    """Its parameters stay the objects that the optimizer holds, and all ranks end up alike."""
    first, second = run_workers(2, learn)

    assert first["same objects"]
    assert first["type"] == "DistributedDataParallel"
    assert torch.equal(first["weight"], second["weight"])
    assert first["loss"] < 0.5 * first["first loss"]
