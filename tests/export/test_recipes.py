"""The page's own hooks, on stand-ins with the signatures of Weights & Biases and MLflow."""

from pathlib import Path

import pytest

from .._snippets import blocks
from .steps import shown

PAGE = Path(__file__).parents[2] / "docs" / "follow.md"


def defined(name):
    """The function that the page defines."""
    (code,) = (each for each in blocks(PAGE, "python") if f"def {name}(" in each)
    namespace = {}
    exec(code, namespace)
    assert len(code.strip().splitlines()) <= 18
    return namespace[name]


class Wandb:
    """A run of Weights & Biases, by the arguments that its methods have."""

    def __init__(self):
        self.axes, self.logged = {}, []

    def define_metric(
        self, name, step_metric=None, step_sync=None, hidden=None, summary=None, goal=None
    ):
        """Give metrics an axis."""
        self.axes[name] = step_metric

    def log(self, data, step=None, commit=None):
        """Take values."""
        self.logged.append(data)


class Mlflow:
    """What the module has, likewise."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None, timestamp=None):
        """Take values."""
        self.logged.append((run_id, step, metrics))


def test_weights_and_biases_has_an_axis_of_steps():
    """Its own step counts calls of the user's."""
    run = Wandb()
    shown(defined("for_wandb")(run))

    assert run.axes == {"evenstep/*": "evenstep/step"}
    assert [one["evenstep/step"] for one in run.logged] == [0, 1]
    assert [one["evenstep/makespan_s"] for one in run.logged] == [0.4, 0.2]


def test_mlflow_is_told_the_run():
    """Its active run is one of the thread, and a hook has another."""
    module = Mlflow()
    shown(defined("for_mlflow")(module, "abc"))

    ((run_id, step, values),) = module.logged
    assert (run_id, step) == ("abc", 0)
    assert values == {"evenstep.makespan_s": 0.4, "evenstep.idle_share": pytest.approx(0.375)}
