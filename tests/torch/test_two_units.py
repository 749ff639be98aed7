"""Two means over different units, as DPO with an SFT term: no one weight is right for both."""

import pytest
import torch

from evenstep.testing import run_workers
from evenstep.torch import check_loss

from .two_units import GLOBAL, Scores, answers, errors, loss_of


@pytest.mark.cluster
def test_two_means_over_unlike_units_are_exact_if_one_is_a_sum():
    """1e-12, where either unit for the whole is wrong by percents, without a word."""
    found, _ = run_workers(2, errors)

    assert found["one of them weighted"] <= 1e-12
    assert found["by samples"] > 0.05
    assert found["by tokens"] > 0.05


@pytest.mark.parametrize("unit", ["samples", lambda part: (part[2][:, 1:] != -100).sum()])
def test_check_loss_names_the_remedy(unit):
    """For either unit."""
    torch.manual_seed(0)
    batch = answers()[:GLOBAL]
    scores = (each.detach() for each in Scores()(*batch))

    with pytest.raises(ValueError, match="got a loss that is not a sum over samples") as caught:
        check_loss(loss_of, *scores, *batch, unit=unit)

    assert "two means over different units" in str(caught.value)
