"""What the real Prometheus and OpenTelemetry have of a run, and what TensorBoard is given."""

import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from evenstep.export import OpenTelemetry, Prometheus, TensorBoard

from .steps import RUN, measured, shown

PHASES = {
    "input",
    "forward",
    "backward",
    "communication",
    "waiting",
    "optimizer",
    "evaluation",
    "checkpoint",
    "rest",
}


class Writer:
    """A stand-in for torch's ``SummaryWriter``."""

    def __init__(self):
        self.written = defaultdict(list)

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        """Take a value."""
        self.written[tag].append((global_step, scalar_value))


def charts(**settings):
    """The scalars that TensorBoard is given, by tag: steps and values."""
    return shown(TensorBoard(Writer(), **settings)).writer.written


def scraped(events):
    """What Prometheus reads off the page, by the name and the labels of each sample."""
    registry = CollectorRegistry()
    shown(Prometheus(registry), events)
    page = generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(page):
        assert family.type in ("gauge", "counter")
        assert family.documentation
        for sample in family.samples:
            found[sample.name, *sample.labels.items()] = sample.value
    return found


def observed(events):
    """What OpenTelemetry's SDK exports, by the name and the attributes of each point."""
    reader = InMemoryMetricReader()
    shown(OpenTelemetry(MeterProvider([reader]).get_meter("training")), events)
    (resource,) = reader.get_metrics_data().resource_metrics
    points, units = {}, {}
    for metric in resource.scope_metrics[0].metrics:
        units[metric.name] = metric.unit
        for point in metric.data.data_points:
            points[metric.name, *dict(point.attributes).items()] = point.value
    return points, units


def test_tensorboard_has_the_steps():
    """By rank where there is one each, at the step that it was."""
    found = charts(every=1)

    assert found["evenstep/step.makespan_s"] == [(0, 0.4), (1, 0.2)]
    assert found["evenstep/step.wall_s"] == [(0, 0.5), (1, 0.5)]
    assert found["evenstep/rank.compute_s/1"] == [(0, 0.4), (1, 0.2)]
    assert found["evenstep/rank.batch_size/0"] == [(0, 4), (1, 6)]
    assert found["evenstep/step.waiting_share"] == [(1, 0.25)]
    assert "evenstep/step.best_split_s" not in found  # nothing was known of it


def test_tensorboard_writes_some_steps_alone():
    """A value of every rank in every step would slow training down."""
    assert charts()["evenstep/step.makespan_s"] == [(0, 0.4)]


def test_prometheus_scrapes_base_units_and_totals():
    """The newest step of each rank, and counters that end as its naming rules have it."""
    found = scraped(RUN)

    assert found["evenstep_step_makespan_seconds",] == 0.2
    assert found["evenstep_step_idle_ratio",] == pytest.approx(0.125)
    assert found["evenstep_rank_compute_seconds", ("rank", "1")] == 0.2
    assert found["evenstep_rank_batch_size", ("rank", "0")] == 6
    assert found["evenstep_steps_total",] == 2
    assert found["evenstep_samples_total",] == 16
    assert found["evenstep_plans_total",] == 1
    assert found["evenstep_faults_total", ("kind", "PolicyFailed")] == 1
    phases = {key[1][1]: v for key, v in found.items() if key[0] == "evenstep_phase_seconds_total"}
    assert phases == dict.fromkeys(PHASES, 0.75)


def test_steps_that_are_told_together_are_counted_one_by_one():
    """As those of a run that was watched."""
    found = scraped([RUN[0], replace(RUN[1], num_steps=10)])

    assert found["evenstep_steps_total",] == 10
    assert found["evenstep_samples_total",] == 80


def test_opentelemetry_observes_the_same_with_units():
    """Under the names that have dots."""
    points, units = observed(RUN)

    assert points["evenstep.step.makespan_s",] == 0.2
    assert points["evenstep.rank.compute_s", ("rank", "1")] == 0.2
    assert points["evenstep.samples",] == 16
    assert points["evenstep.phase_s", ("phase", "waiting")] == 0.75
    assert units["evenstep.rank.compute_s"] == "s"
    assert units["evenstep.step.idle_share"] == "1"


def test_all_adapters_have_the_same_metrics():
    """One list of names: what one shows, the others show."""
    points, _ = observed(RUN)
    plain = {"_s": "_seconds", "_share": "_ratio"}
    names = set()
    for name, *_ in points:
        unit = next((unit for unit in plain if name.endswith(unit)), "")
        base = name.removesuffix(unit) + plain.get(unit, "")
        names.add(base.replace(".", "_"))

    assert names == {name.removesuffix("_total") for name, *_ in scraped(RUN)}
    tags = {tag.split("/")[1] for tag in charts(every=1)}
    assert tags < {name.removeprefix("evenstep.") for name, *_ in points}


def test_many_ranks_have_quantiles_and_the_largest_values():
    """A series each for a thousand ranks is too much for what stores them."""
    ranks = range(1000)
    step = measured(0, (8,) * 1000, tuple(0.1 + rank / 1000 for rank in ranks))
    for found, name in (
        (scraped([step]), "compute_seconds"),
        (observed([step])[0], "compute_s"),
    ):
        by_label = defaultdict(dict)
        for (metric, *labels), value in found.items():
            if metric.endswith(name):
                ((label, which),) = labels
                by_label[label][which] = value

        assert by_label["rank"].keys() == {str(rank) for rank in range(992, 1000)}
        values = by_label["quantile"]
        assert [values[q] for q in ("0", "0.5", "0.9", "1")] == pytest.approx(
            [0.1, 0.6, 0.999, 1.099], abs=0.002
        )
        assert len(found) < 100


def test_a_rank_that_left_is_shown_no_longer():
    """After a restart with fewer, or where others are slower now."""
    found = scraped([*RUN, measured(2, (8,), (0.3,))])

    assert ("evenstep_rank_compute_seconds", ("rank", "1")) not in found


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TensorBoard("runs/mine"), r"`TensorBoard\(writer=...\)` must have `add_scalar`"),
        (lambda: TensorBoard(Writer), "Writer"),
        (lambda: TensorBoard(Writer(), every=0), r"`TensorBoard\(every=...\)` must be at least 1"),
        (lambda: Prometheus(9400), r"`Prometheus\(registry=...\)` must have `register`, got 9400"),
        (lambda: OpenTelemetry(None), r"`OpenTelemetry\(meter=...\)` must have `create_observable"),
    ],
)
def test_what_is_none_is_refused(make, words):
    """With what to give."""
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("name", "module"), [("Prometheus", "prometheus_client"), ("OpenTelemetry", "opentelemetry")]
)
def test_a_missing_library_is_named_with_what_to_install(name, module):
    """Where an adapter is made; the room itself needs none of them."""
    code = f"""
import sys
sys.modules[{module!r}] = None
from evenstep.export import {name}
try:
    {name}(None)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert f"`{name}` needs " in done.stdout
    assert "[export]" in done.stdout
