"""Three workers of a real cluster against one process, in every way that a model is trained."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from .._tiers import Groups, slow_but
from .clusters import found, start

TOLD = (
    *("fit", "arrays", "arrays_shuffled", "fit_sum", "again"),
    *("outputs", "class_weight", "own_step", "added"),
)
ALONE = (*TOLD, "watched", "loop", "tutorial", "pipeline")
# What ends badly comes last.
CASES = (*ALONE, "many_sizes", "resume", "backup", "speeds", "drift", "refused", "killed")
FIRST = ("fit",)
NUM_SAMPLES, BATCH_SIZE = 122, 12
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def sizes(number, total, world_size=3):
    """What the policy of the workers draws."""
    cuts = np.random.default_rng(number).choice(np.arange(1, total), world_size - 1, replace=False)
    return np.diff([0, *np.sort(cuts), total])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What came of every case, on three workers and alone: a cluster takes long to start."""

    def run(cases):
        folder = tmp_path_factory.mktemp("tensorflow")
        alone = [case for case in cases if case in ALONE]
        running = {3: start(folder / "3", 3, *cases), 1: start(folder / "1", 1, *alone)}
        said = {number: process.communicate()[0] for number, process in running.items()}
        assert running[1].returncode == 0, said[1]
        told = {
            case: {number: found(folder / str(number), case, number) for number in running}
            for case in cases
        }
        assert None not in [results[3][0] for results in told.values()], said[3][-3000:]
        return told

    groups = Groups(FIRST, CASES, run)
    return lambda case, num_workers=3: groups[case][num_workers]


@pytest.mark.parametrize("case", slow_but(FIRST, ALONE))
def test_parameters_are_those_of_one_process(runs, case):
    """1e-9 after 55 steps under plans that change at every step, the short last ones included."""
    (alone,) = runs(case, 1)
    for worker in runs(case):
        assert worker["weights"] == pytest.approx(alone["weights"], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("case", slow_but(FIRST, TOLD))
def test_metrics_are_weighted_by_samples(runs, case):
    """What `fit` and `evaluate` say is what they say in one process."""
    (alone,) = runs(case, 1)
    assert len(alone["history"]) > 1
    for worker in runs(case):
        assert worker["history"].keys() == alone["history"].keys()
        for name, values in alone["history"].items():
            assert worker["history"][name] == pytest.approx(values, rel=1e-6), name
        assert worker.get("evaluated", []) == pytest.approx(alone.get("evaluated", []), rel=1e-6)


@pytest.mark.slow
def test_classes_may_weigh_unlike(runs):
    """`fit(class_weight=...)` reports what plain Keras reports, to rounding."""
    (plain,) = runs("class_weight", 1)
    for worker in runs("class_weight"):
        assert worker["history"]["loss"] == pytest.approx(plain["history"]["loss"], rel=1e-9)


def test_a_step_decides_the_very_next(runs):
    """Sizes are those that were drawn after the step before: the first step is not shown."""
    first = runs("fit")[0]
    of_full_steps = [ran for ran in first["sizes"] if sum(ran) == BATCH_SIZE]
    drawn = [sizes(number, BATCH_SIZE).tolist() for number in range(len(of_full_steps))]

    assert len(first["sizes"]) == 55
    assert first["rejected"] == 0
    assert of_full_steps == [drawn[0], *drawn[:-1]]


def test_fit_knows_its_steps_and_its_place(runs):
    """Eleven steps an epoch; after five, the sixth begins."""
    for worker in runs("fit"):
        assert worker["cardinality"] == 11
    assert runs("fit", 1)[0]["cardinality"] == 11
    for worker in runs("fit"):
        assert worker["position"] == {"epoch": 5, "step": 0, "num_steps": 55}


@pytest.mark.slow
def test_a_watch_steps_aside_for_a_balancer(runs):
    """With one line a fit; the balancer measures every step of both."""
    for worker in runs("watched"):
        assert worker["said"].count("evenstep watch: off") == 2
        assert worker["said"].count("`Runtime(run_dir=...)`") == 2
    assert runs("watched")[0]["measured"] == 22


@pytest.mark.slow
@pytest.mark.parametrize("case", ["loop", "tutorial", "pipeline"])
def test_each_sample_is_trained_on_once_an_epoch(runs, case):
    """Over all workers, whatever the plans; every step has the samples of one process' step."""
    workers = runs(case)
    (alone,) = runs(case, 1)
    for step, whole in enumerate(alone["ids"]):
        parts = [worker["ids"][step] for worker in workers]

        assert sorted(chain(*parts)) == sorted(whole)
    epoch = list(chain(*alone["ids"][:11]))
    assert sorted(epoch) == list(range(NUM_SAMPLES))
    assert epoch != list(chain(*alone["ids"][11:22]))  # and another order the next time


@pytest.mark.slow
def test_only_own_samples_are_mapped(runs):
    """Each of them once, on the worker that trains on it."""
    for worker in runs("pipeline"):
        assert worker["num_mapped"] == sum(map(len, worker["ids"]))


@pytest.mark.slow
def test_one_trace_serves_all_sizes(runs):
    """200 steps with more than 50 sizes, and the training step is traced once."""
    for worker in runs("many_sizes"):
        assert worker["num_steps"] == 200
        assert worker["num_sizes"] >= 50
        assert worker["traces"] == 1
    assert [worker["traces"] for worker in runs("loop")] == [1, 1, 1]
    # Twice where the optimizer makes its variables in the function.
    assert [worker["traces"] for worker in runs("tutorial")] == [2, 2, 2]
    # In `fit`, Keras builds a model twice without training it.
    assert {worker["traces"] for worker in runs("speeds")} <= {1, 2, 3}


@pytest.mark.slow
def test_a_run_goes_on_within_its_epoch(runs):
    """Every sample once, before and after; steps count on, and estimates are taken up."""
    workers = runs("resume")
    trained = chain(*(ids for each in workers for ids in each["before"] + each["after"]))

    assert sorted(trained) == list(range(NUM_SAMPLES))
    assert [len(each["after"]) for each in workers] == [7, 7, 7]
    assert workers[0]["restored"] == ["resumed"]
    assert workers[0]["first_step"] == [4]


@pytest.mark.slow
def test_backup_and_restore_goes_on_with_a_fit(runs):
    """Interrupted and begun again, it ends where the uninterrupted one does."""
    for worker in runs("backup"):
        assert worker["resumed"] == pytest.approx(worker["whole"], rel=1e-9, abs=1e-9)


@pytest.mark.slow
def test_fast_workers_get_more(runs):
    """Each twice as fast as the one before; own time is measured, not the wait for others."""
    first = runs("speeds")[0]
    planned = first["planned"]
    equal = np.array(first["compute_s"][1])

    assert planned[0] < planned[1] < planned[2]
    assert sum(planned) == 28
    assert equal[0] > 2 * equal[2]  # four times, and what is not sleep


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "epochs", "said"),
    [
        ("peeked", 0, "another order on rank 0 | ranks 1, 2 in this epoch"),
        ("peeked, without the remainder", 0, "another order on rank 0 | ranks 1, 2"),
        ("peeked, augmented", 0, "another order on rank 0 | ranks 1, 2"),
        ("peeked later", 1, "another order on ranks 0, 1 | rank 2"),
        ("loop", 0, "another order on rank 0 | ranks 1, 2"),
        ("sharded", 1, "other samples on rank 0 | rank 1 | rank 2"),
    ],
)
def test_pipelines_that_drift_apart_are_noticed(runs, name, epochs, said):
    """In the same epoch, on every worker, by an error that says who; other data in the second."""
    for worker in runs("drift"):
        assert worker[name]["epochs"] == epochs
        assert said in worker[name]["said"]
        assert "on all workers or on none" in worker[name]["said"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["augmented", "alike"])
def test_pipelines_in_step_are_let_through(runs, name):
    """Content drawn at random on every worker included, where the labels are in step."""
    for worker in runs("drift"):
        assert worker[name] == {"epochs": 3, "said": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("batched", "pipeline of single samples"),
        ("batched, prefetched", "pipeline of single samples"),
        ("endless", "have a length, got an endless one"),
        ("unknown", "assert_cardinality"),
        ("ragged", "of one shape, got RaggedTensor. Pad them first"),
        ("sparse", "of one shape, got SparseTensor. Pad them first"),
        ("rows", "as many rows each"),
        ("none", "`Balancer.dataset(source)`"),
        ("shuffled pipeline", "seed"),
        ("policy", "fastest"),
        ("policy class", "not the class"),
        ("size", "one sample for each worker"),
        ("reduction", '"mean" or "sum"'),
        ("strategy", "MultiWorkerMirroredStrategy"),
        ("strategy alone", "Each process would train alone"),
        ("no model", "`keras.Model`"),
        ("no optimizer", "`keras.optimizers.Optimizer`"),
        ("state", "come from `Balancer.state_dict()`"),
        ("clipping", "clips each worker's own gradient"),
        ("batch norm", "normalises over each worker's own samples"),
        ("activity", "bypasses the output"),
        ("twice", "given each model once"),
        ("outside", "be made under the balancer's strategy"),
        ("nested", "within 'sequential"),
        ("one behind the other", "Prepare only the last one"),
        ("one behind the other, inside", "Prepare only the last one"),
        (
            "unlike",
            "The order of samples must be the same on all ranks, got shuffled by seed 0",
        ),
        ("eager", "`Model.compile(run_eagerly=...)`"),
        ("jit", "`Model.compile(jit_compile=...)`"),
        ("several steps", "`Model.compile(steps_per_execution=...)`"),
        ("sum", "`Balancer(loss_reduction=...)`"),
        ("masked", "have outputs without a mask"),
        ("plain data", "what `balancer.dataset(...)` returned"),
        ("plain data, iterator", "what `balancer.dataset(...)` returned"),
        ("another batch size", "`Model.fit(batch_size=...)` must be the 12 samples"),
        ("other arrays", "has its training data"),
        ("split", "`Model.fit(validation_split=...)` must leave some rows on both sides"),
        ("fixed size", "input_signature=[dataset.element_spec]"),
        ("evaluated", "`Model.evaluate(x)` must be data as it is"),
        ("on a batch", "`Model.train_on_batch(...)` must be left out with several workers"),
    ],
)
def test_what_cannot_be_balanced_is_refused(runs, name, said):
    """On every worker, with the reason and what to do instead."""
    for worker in runs("refused"):
        assert worker[name] is not None
        assert said in worker[name]


@pytest.mark.slow
def test_what_no_gradient_goes_through_is_no_second_weight(runs):
    """A critic's own step sees what a generator made, and does not train it."""
    for name in ("detached", "of its shape"):
        assert [worker[name] for worker in runs("refused")] == [None] * 3


@pytest.mark.slow
def test_a_worker_that_dies_is_named(runs):
    """The others end their fit with an error that says who, before any deadline."""
    *others, dead = runs("killed")

    assert dead is None
    for worker in others:
        assert worker["rank"] == 2
        assert "Rank 2 on 127.0.0.1 was lost" in worker["said"]
        assert worker["after_s"] < 20  # its deadline is 30
