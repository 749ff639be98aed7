"""What a loss is, found out on a small batch: a mean, a sum, a mean over targets, or none."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from evenstep.torch import check_loss

WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 8.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def scores(num_samples=12, dtype=torch.float64):
    return torch.randn(num_samples, 5, dtype=dtype)


def classes(num_samples=12):
    return torch.arange(num_samples) * 7 % 5


def some_ignored():
    """Two of six, three of four and none of two are left out."""
    targets = classes()
    targets[[0, 3, 6, 7, 9]] = -100
    return targets


def info_nce(left, right):
    """CLIP's loss: every pair of the batch is compared."""
    similar = functional.normalize(left, dim=1) @ functional.normalize(right, dim=1).T
    wanted = torch.arange(len(left))
    return (
        functional.cross_entropy(similar, wanted) + functional.cross_entropy(similar.T, wanted)
    ) / 2


def hardest_triplets(embedded, labels):
    """Against the farthest of its own class and the nearest of another one."""
    distance = torch.cdist(embedded, embedded)
    same = labels[:, None] == labels[None]
    farthest = distance.masked_fill(~same, 0.0).amax(1)
    nearest = distance.masked_fill(same, torch.inf).amin(1)
    return (farthest - nearest + 5.0).clamp(min=0.0).mean()


def behind_batch_norm(x, y):
    return functional.mse_loss(functional.batch_norm(x, None, None, training=True), y)


def only_together(x, y):
    """A mean, but for a term in the gradient that forwards of a few samples do not have."""
    extra = x[:, 4].square().sum() if len(x) > 6 else 0.0 * x.sum()
    return functional.cross_entropy(x[:, :4], y % 4) + extra - extra.detach()


def hinge(x):
    return x.clamp(min=0.0).mean()


def late_negative():
    """The last third of the samples is on the flat side of a hinge."""
    return torch.cat([torch.ones(10), -torch.ones(2)])


def with_decay(x, y):
    """A term that does not depend on the samples."""
    return functional.cross_entropy(x, y, reduction="sum") + 3.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("loss_fn", "targets"),
    [
        (functional.cross_entropy, classes()),
        (nn.MSELoss(), torch.ones(12, 5)),
        (lambda x, y: functional.mse_loss(x[:, 0], y), torch.ones(12)),
        (lambda x, y: functional.cross_entropy(x, y) + 3.0, classes()),
    ],
    ids=["cross entropy", "mse", "one number each", "decay beside a mean"],
)
def test_a_mean_over_samples_is_known(loss_fn, targets, dtype):
    """The default of `Balancer` is right for it."""
    targets = targets.to(dtype) if targets.is_floating_point() else targets

    found = check_loss(loss_fn, scores(dtype=dtype), targets)

    assert found.kind == "mean"
    assert found.shares == pytest.approx((6 / 12, 4 / 12, 2 / 12), abs=1e-5)
    assert found.error < (1e-12 if dtype == torch.float64 else 1e-5)


def test_a_sum_is_known():
    """And told apart from a mean, whatever is claimed."""
    loss_fn = nn.CrossEntropyLoss(reduction="sum")

    found = check_loss(loss_fn, scores(), classes(), reduction="sum")

    assert found.kind == "sum"
    with pytest.raises(ValueError, match=r"got a sum over samples.*loss_reduction='sum'"):
        check_loss(loss_fn, scores(), classes())
    with pytest.raises(ValueError, match=r"got a mean over samples. Leave `loss_reduction='sum'`"):
        check_loss(functional.cross_entropy, scores(), classes(), reduction="sum")


def test_ignored_targets_ask_for_a_unit():
    """With the shares, and what the function has to return."""
    with pytest.raises(ValueError, match=r"units other than samples, with shares 0.5714, 0.1429"):
        check_loss(functional.cross_entropy, scores(), some_ignored())

    found = check_loss(
        functional.cross_entropy,
        scores(),
        some_ignored(),
        unit=lambda part: (part[1] != -100).sum(),
    )

    assert found.kind == "units"
    assert found.shares == pytest.approx((4 / 7, 1 / 7, 2 / 7))


def test_class_weights_ask_for_their_sum():
    """The number of targets is not what the loss divides by."""

    def loss_fn(x, y):
        return functional.cross_entropy(x, y, weight=WEIGHTS)

    with pytest.raises(ValueError, match=r"Balancer\(unit=...\).*sum of their class weights"):
        check_loss(loss_fn, scores(), classes())
    with pytest.raises(ValueError, match=r"where `unit` says 0.5, 0.3333, 0.1667"):
        check_loss(loss_fn, scores(), classes(), unit=lambda part: len(part[1]))
    found = check_loss(loss_fn, scores(), classes(), unit=lambda part: WEIGHTS[part[1]].sum())

    assert found.kind == "units"


def test_a_part_without_a_target_has_no_share():
    """Its loss is NaN, and the whole knows nothing of it."""
    targets = classes()
    targets[6:10] = -100

    found = check_loss(
        functional.cross_entropy, scores(), targets, unit=lambda part: (part[1] != -100).sum()
    )

    assert found.shares == pytest.approx((6 / 8, 0.0, 2 / 8))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("loss_fn", "other"),
    [
        (info_nce, torch.randn(12, 5, generator=torch.Generator().manual_seed(4)).double()),
        (hardest_triplets, torch.arange(12) % 3),
        (behind_batch_norm, torch.zeros(12, 5).double()),
        (with_decay, classes()),
        (only_together, classes()),
    ],
    ids=["contrastive", "triplets", "batch norm", "decay in a sum", "gradient alone"],
)
def test_what_no_weight_repairs_is_refused(loss_fn, other, reduction):
    """With what to do instead."""
    with pytest.raises(
        ValueError, match=r"no weight makes it exact.*gathered over ranks, or equal"
    ):
        check_loss(loss_fn, scores(), other, reduction=reduction)


def test_tensors_that_need_a_gradient_are_the_ones_looked_at():
    """Others of floating point may not have a derivative."""
    soft = torch.rand(12, 5, dtype=torch.float64)
    inputs = torch.randn(12, dtype=torch.float64, requires_grad=True)

    found = check_loss(lambda y, x: functional.mse_loss(x, y.detach()[:, 0]), soft, inputs)

    assert found.kind == "mean"
    assert inputs.grad is None


@pytest.mark.parametrize(
    ("loss_fn", "tensors", "message"),
    [
        (functional.mse_loss, (scores(4), scores(4)), "at least 6 samples"),
        (functional.mse_loss, (scores(12), scores(8)), "one row for each of at least 6"),
        (functional.mse_loss, (scores(12), 3), "one row for each of at least 6"),
        (functional.mse_loss, (classes(), classes()), "single or double precision"),
        (functional.mse_loss, (scores(12, torch.bfloat16),) * 2, "single or double precision"),
        (
            lambda x: x,
            (scores(),),
            r"return a scalar tensor that depends on its arguments, got one of shape \(12, 5\)",
        ),
        (
            lambda x: 1.0,
            (scores(),),
            "return a scalar tensor that depends on its arguments, got 1.0",
        ),
        (lambda x: nn.functional.dropout(x).mean(), (scores(),), "same value when called again"),
        (lambda x: 0.0 * x.sum(), (scores(),), "shows what the loss does"),
        (lambda x: (x / 0.0).mean(), (scores(),), "shows what the loss does"),
        (lambda x: x.detach().mean(), (scores(),), "one that needs no gradient"),
        (hinge, (late_negative(),), "2 samples in a row without a gradient"),
    ],
)
def test_a_batch_that_shows_nothing_is_refused(loss_fn, tensors, message):
    """By name, with what to give instead."""
    with pytest.raises(ValueError, match=message):
        check_loss(loss_fn, *tensors)
