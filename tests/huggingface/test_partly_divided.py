"""A loss of which `num_items_in_batch` divides a part alone is not exact, and is said to be so."""

import warnings

import pytest

from evenstep.exceptions import EvenstepWarning
from evenstep.testing import run_workers

from .trainer_runs import SELDOM, Case, make, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def loss_with_a_rest(trainer, model, inputs, num_items_in_batch, **_):
    """Return Trainer's own loss, and a mean over the batch beside it, as of a router."""
    from transformers import Trainer

    own = Trainer.compute_loss(trainer, model, inputs, num_items_in_batch=num_items_in_batch)
    return own + 0.1 * model(input_ids=inputs["input_ids"])["logits"].square().mean()


def warned(rank, folder):
    """Return what is warned of, with such a loss and with Trainer's own."""
    found = []
    for case in (Case(loss=loss_with_a_rest, more=SELDOM), Case(more=SELDOM)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(make(folder, case, balancing={}))
        ours = [one for one in caught if issubclass(one.category, EvenstepWarning)]
        found.append([str(one.message) for one in ours])
    return found


def test_a_loss_with_a_rest_is_warned_of_once(tmp_path):
    """On each rank, with the remedy; a loss without one is not."""
    for with_a_rest, without in run_workers(2, warned, str(tmp_path)):
        assert len(with_a_rest) == 1
        assert "not divided by `num_items_in_batch`" in with_a_rest[0]
        assert "balancing=" in with_a_rest[0]
        assert without == []
