"""What a Trainer can be set up for that is not balanced is refused before it trains."""

import warnings

import pytest
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from evenstep.lightning import BalanceCallback
from evenstep.torch import Bounds, Runtime

from .fit_runs import trainer_of


class Manual(BoringModel):
    automatic_optimization = False


class Taking(BoringModel):
    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return self.step(batch)


def fit(model=None, *callbacks, **options):
    callback = BalanceCallback(runtime=Runtime(line_every=None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_of(1, [callback, *callbacks], **options).fit(
            model or BoringModel(), DataLoader(RandomDataset(32, 8)), DataLoader([])
        )
    return callback


@pytest.mark.parametrize(
    ("attempt", "remedy"),
    [
        (lambda: fit(Manual()), "Return one loss from `training_step`"),
        (lambda: fit(Taking()), "Write `training_step(self, batch, batch_idx)`"),
        (lambda: fit(reload_dataloaders_every_n_epochs=1), "Have the data set or the sampler"),
        (lambda: fit(None, LearningRateFinder()), "Tune with a `Trainer` of its own"),
        (lambda: BalanceCallback(policy="no such"), "Names are lower case"),
        (lambda: BalanceCallback(runtime=Runtime(process_group=object())), "on all ranks"),
        (lambda: BalanceCallback(bounds=Bounds(max=3), cost="length"), "Limit forwards"),
        (lambda: BalanceCallback(network=object()), "in a loop of your own"),
    ],
    ids=["manual", "taking", "reload", "tuner", "policy", "group", "bounds", "network"],
)
def test_a_setting_is_refused_with_its_remedy(attempt, remedy):
    """Where it is made, or at the latest where the fit begins."""
    with pytest.raises(ValueError, match="must") as refused:
        attempt()

    assert remedy in str(refused.value)


def test_one_process_trains_as_it_would():
    """Nothing of the trainer is replaced, and the callback is there for its balancer."""
    callback = fit(max_epochs=1, limit_train_batches=2)

    assert callback.balancer is not None
    assert callback.balancer.batch_sizes == ()
    assert callback.state_dict() == {}
