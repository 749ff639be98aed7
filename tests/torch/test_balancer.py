"""What the public face does with one process, with many, and with what it cannot balance."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evenstep.events import StepMeasured
from evenstep.policies import Auto
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds, Runtime

from .runs import FAST_S, SLOW_S, blind, learn, logged_mean, micro_batches, short, with_memory

QUIET = Runtime(line_every=None)


def stock(num_samples: int = 64, **options: Any) -> DataLoader:
    """Return a stock loader of pairs."""
    samples = TensorDataset(torch.randn(num_samples, 4), torch.randn(num_samples, 4))
    return DataLoader(samples, **{"batch_size": 8, **options})


def linear() -> DistributedDataParallel:
    """Return a small model in DDP."""
    return DistributedDataParallel(nn.Linear(4, 4))


def global_batch_below_the_world() -> None:
    Balancer(1, runtime=QUIET).prepare(linear(), stock(batch_size=1))


def global_batch_that_disagrees() -> None:
    Balancer(96, runtime=QUIET).prepare(linear(), stock())


def bounds_that_cannot_be_met() -> None:
    balancer = Balancer(bounds=Bounds(max=5), runtime=QUIET)
    _, loader = balancer.prepare(linear(), stock())
    next(iter(loader))


def smallest_sizes_past_the_batch() -> None:
    Balancer(bounds=Bounds(min=9), runtime=QUIET).prepare(linear(), stock())


def second_prepare() -> None:
    balancer = Balancer(runtime=QUIET)
    model = balancer.prepare(linear())
    balancer.prepare(model)


def second_prepare_by_another() -> None:
    model = Balancer(runtime=QUIET).prepare(linear())
    Balancer(runtime=QUIET).prepare(model)


def second_loader() -> None:
    Balancer(runtime=QUIET).prepare(linear(), stock(16), stock(19))


def loader_without_a_model() -> None:
    next(iter(Balancer(runtime=QUIET).prepare(stock())))


def something_else() -> None:
    Balancer(runtime=QUIET).prepare(linear(), [1, 2, 3])


def no_parameters() -> None:
    Balancer(runtime=QUIET).prepare(nn.ReLU())


def ddp_of_another_torch() -> None:
    model = linear()
    del model.require_forward_param_sync
    Balancer(runtime=QUIET).prepare(model)


def weight_given_twice() -> None:
    balancer = Balancer(runtime=QUIET)
    model, loader = balancer.prepare(linear(), stock())
    for x, _ in loader:
        balancer.weight(model(x).mean())


def term_weighted_twice() -> None:
    balancer = Balancer(runtime=QUIET)
    model, loader = balancer.prepare(linear(), stock(), weighting="loss")
    for x, _ in loader:
        term = balancer.weight(model(x).mean())
        balancer.weight(0.5 * (term + model(x).square().mean())).backward()


def weight_past_the_prepared_model() -> None:
    balancer = Balancer(runtime=QUIET)
    model, loader = balancer.prepare(linear(), stock(), weighting="loss")
    for x, _ in loader:
        balancer.weight(model.module(x).mean()).backward()


def output_without_a_gradient() -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).detach()

    model, loader = Balancer(runtime=QUIET).prepare(DistributedDataParallel(Blind()), stock())
    for x, _ in loader:
        model(x)


def output_fed_back() -> None:
    model, loader = Balancer(runtime=QUIET).prepare(linear(), stock())
    between = nn.Linear(4, 4)
    for x, _ in loader:
        model(between(model(x)))


def two_kinds_of_loop() -> None:
    model, loader = Balancer(runtime=QUIET).prepare(linear(), stock(16))
    for x, _ in loader:
        model(x).mean().backward()
    next(loader.steps())


def two_weightings() -> None:
    balancer = Balancer(runtime=QUIET)
    balancer.prepare(linear(), weighting="loss")
    balancer.prepare(linear(), stock())


def mean_without_a_step() -> None:
    balancer = Balancer(runtime=QUIET)
    balancer.prepare(linear(), stock())
    balancer.mean(1.0)


def prepare_after_close() -> None:
    balancer = Balancer(runtime=QUIET)
    balancer.close()
    balancer.prepare(linear())


CASES: dict[str, tuple[Callable[[], None], str]] = {
    "global batch below the world": (
        global_batch_below_the_world,
        "`Balancer(global_batch_size=...)` must be at least the number of workers, 2, got 1.",
    ),
    "global batch that disagrees": (
        global_batch_that_disagrees,
        "must agree with `DataLoader(batch_size=8)` on 2 workers, which makes 16, got 96. Give",
    ),
    "bounds that cannot be met": (
        bounds_that_cannot_be_met,
        "`Bounds(max=...)` must add up to the global batch of 16 at least, in whole granules, got",
    ),
    "smallest sizes past the batch": (
        smallest_sizes_past_the_batch,
        "`Bounds(min=...)` must add up to the global batch of 16 at most, in whole granules, got",
    ),
    "second prepare": (second_prepare, "must be given each model once"),
    "second prepare by another": (second_prepare_by_another, "must be given each model once"),
    "second loader": (
        second_loader,
        "with 0 samples in a short last step, got 3. Set `DataLoader(drop_last=True)` on both",
    ),
    "loader without a model": (loader_without_a_model, "`prepare` the model too"),
    "something else": (something_else, "must be given torch modules and `DataLoader`s, got list"),
    "no parameters": (no_parameters, "must have parameters, got ReLU without any"),
    "DDP of another torch": (
        ddp_of_another_torch,
        "must keep a DDP's `require_forward_param_sync`, on which evenstep relies, got none there.",
    ),
    "weight given twice": (weight_given_twice, "must be used on models prepared with"),
    "term weighted twice": (term_weighted_twice, "be given a loss of which no term is weighted"),
    "weight past the prepared model": (
        weight_past_the_prepared_model,
        "got a step without one. Call the prepared model itself, `model(x)`, not `model.forward",
    ),
    "output without a gradient": (output_without_a_gradient, "return a tensor that needs a grad"),
    "output fed back": (output_fed_back, "without other parameters in between"),
    "two kinds of loop": (two_kinds_of_loop, "use one kind of loop"),
    "two weightings": (two_weightings, "must be 'loss', as in the call before, got 'output'."),
    "mean without a step": (mean_without_a_step, "give `balancer.mean(value, count=...)`"),
    "prepare after close": (prepare_after_close, "Make a new `Balancer`"),
}


def provoke(rank: int) -> dict[str, str]:
    """Return the error's text of every case."""
    texts = {}
    for name, (mistake, _) in CASES.items():
        try:
            mistake()
        except (ValueError, RuntimeError) as error:
            texts[name] = str(error)
    return texts


def batch_norm(rank: int) -> tuple[list[str], tuple[int, ...], list[str]]:
    """Return the warnings for a model with local BatchNorm, its sizes, those for one alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        balancer = Balancer(policy="tests.torch.plans:Greedy", runtime=QUIET)
        model, loader = balancer.prepare(model, stock())
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
    sizes = balancer.batch_sizes
    balancer.close()
    with warnings.catch_warnings(record=True) as none:
        warnings.simplefilter("always")
        Balancer(runtime=QUIET).prepare(nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)))
    return [str(warning.message) for warning in caught], sizes, [str(w.message) for w in none]


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
        ({"policy": "atuo"}, "Did you mean 'auto'"),
        ({"bounds": (2, 12)}, r"`Balancer\(bounds=...\)` must be a `Bounds`, got \(2, 12\)"),
        ({"runtime": {"line_every": 5}}, r"`Balancer\(runtime=...\)` must be a `Runtime`, got"),
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
        ({"heartbeat_s": 0}, r"`Runtime\(heartbeat_s=...\)` must be a positive number of seconds"),
        (
            {"heartbeat_s": "1"},
            r"`Runtime\(heartbeat_s=...\)` must be a positive number of seconds",
        ),
        ({"deadline_s": -1}, r"`Runtime\(deadline_s=...\)` must be a positive number of seconds"),
        ({"hang_s": -1}, r"`Runtime\(hang_s=...\)` must be a positive number of seconds, or None"),
        ({"deadline_s": 2.0}, r"`Runtime\(heartbeat_s=...\)` must be at most a third"),
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
