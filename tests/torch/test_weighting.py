"""The weight at the model's output: on every tensor once, in any container, in place or not."""

import copy
import gc
import io
import math
import warnings
import weakref
from collections import OrderedDict, deque, namedtuple
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from evenstep.testing import run_workers
from evenstep.torch._model._compiled import OuterHooks, inert
from evenstep.torch._model._weighting import Backward, ForwardHook, feeds_back
from evenstep.torch._model._weighting import scale as scale_by_use
from evenstep.torch._step._reductions import look_at
from evenstep.torch._step._tickets import Match

from .in_place import CASES, OURS, REFUSED, found_in

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor
    name: str


@dataclass
class Fixed:
    """A forward whose batch has a known weight."""

    weight: float
    looks: list = field(default_factory=list)
    trains: object = None
    compares: bool = False
    reduces: bool | None = None
    match = Match((), 1.0)


class Detached(nn.Module):
    """Gives back what no gradient comes through."""

    def forward(self, x):
        return x.detach()


class Weights:
    """Gives every forward one weight; None is outside of a step."""

    def __init__(self, weight):
        self.weight = weight

    def begin_use(self, model, tensors, *, reduces):
        return None if self.weight is None else Fixed(self.weight)

    def outside(self):
        """Nothing to note."""

    end_use = outside


class Told:
    """Writes down what it is told of backwards."""

    def __init__(self, heard):
        self.heard = heard

    backward_begins = Weights.outside

    def backward_done(self, uses):
        self.heard.append("done")

    def reduced(self):
        self.heard.append("reduced")


def scale(value, weight, backward):
    return scale_by_use(value, Fixed(weight), backward)


@pytest.fixture
def ended():
    """What is told of backwards."""
    return []


@pytest.fixture
def backward(ended):
    return Backward(Told(ended))


def hooked(module, weight, backward):
    """Return ``module`` with the hook on it."""
    hook = ForwardHook(Weights(weight), backward)
    OuterHooks(module, first=[hook.before], after=[hook]).place()
    return module


def leaf():
    """Return a tensor that collects its gradient."""
    return torch.ones(2, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: x, lambda out: [out]),
        (lambda x: (x, x * 2), list),
        (lambda x: [x, "kept", None], lambda out: [out[0]]),
        (lambda x: Pair(x, 3), lambda out: [out.first]),
        (lambda x: {"a": x, "deep": {"b": (x,)}}, lambda out: [out["a"], out["deep"]["b"][0]]),
        (lambda x: OrderedDict(a=x), lambda out: [out["a"]]),
        (lambda x: MappingProxyType({"a": x}), lambda out: [out["a"]]),
        (lambda x: Frozen(x, "kept"), lambda out: [out.loss]),
    ],
    ids=["tensor", "tuple", "list", "named", "nested", "ordered", "mapping", "dataclass"],
)
def test_every_tensor_in_a_container_is_scaled_once(wrap, unwrap, backward):
    """And the container comes back as what it was, a new one."""
    source = leaf()
    plain = leaf()
    output = wrap(source * 1)

    scaled, count = scale(output, 3.0, backward)
    sum(tensor.sum() for tensor in unwrap(scaled)).backward()
    sum(tensor.sum() for tensor in unwrap(wrap(plain * 1))).backward()

    assert type(scaled) is type(output)
    assert count == len(set(map(id, unwrap(scaled))))
    assert torch.equal(source.grad, 3.0 * plain.grad)
    assert isinstance(scaled, torch.Tensor) or scaled is not output


def test_values_go_through_unchanged(backward):
    """Only gradients are scaled."""
    source = leaf()

    scaled, _ = scale(source * 2, 3.0, backward)

    assert torch.equal(scaled, source * 2)


def test_a_step_leaves_nothing_for_the_collector(backward):
    """What a forward keeps goes with its output: steps of a few milliseconds would feel it."""
    use = Fixed(0.5)
    alive, output = weakref.ref(use), torch.ones(3, requires_grad=True)
    gc.disable()
    try:
        scale_by_use(output, use, backward)
        del use
        assert alive() is None
    finally:
        gc.enable()


def test_what_needs_no_gradient_is_the_same_object(backward):
    """Labels, masks and numbers in the output are left alone."""
    labels = torch.ones(3)

    scaled, count = scale({"labels": labels}, 3.0, backward)

    assert scaled["labels"] is labels
    assert count == 0


def test_the_end_of_a_backward_is_told_once(backward, ended):
    """However many outputs it started from, and again for the next backward."""
    source = leaf()
    for _ in range(3):
        (first, second), _ = scale((source * 1, source * 2), 1.0, backward)
        (first.sum() + second.sum()).backward()

    assert ended.count("done") == 3


def test_what_others_add_to_a_backward_comes_in_between(ended):
    """As DDP's wait for the all-reduce does: own work is done before it, all is over after it."""
    backward = Backward(Told(ended))
    source = leaf()
    inner = source * 1

    def as_ddp_does(grad):
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: ended.append("waited"))

    inner.register_hook(as_ddp_does)
    scale(inner, 1.0, backward)[0].sum().backward()

    assert ended == ["done", "waited", "reduced"]


def test_a_backward_that_raised_is_forgotten(backward, ended):
    """The engine drops its callbacks then; the next step must not be deaf."""
    source = leaf()

    def fail(grad):
        raise ValueError("a user's hook")

    inner = source * 1
    inner.register_hook(fail)
    scaled, _ = scale(inner, 1.0, backward)
    with pytest.raises(ValueError, match="a user's hook"):
        scaled.sum().backward()
    scale(source * 1, 1.0, backward)[0].sum().backward()

    assert ended.count("done") == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_keeps_its_type(dtype, backward):
    """The weight is a 0-dim tensor of at least single precision, and promotes nothing."""
    source = torch.ones(2, dtype=dtype, requires_grad=True)

    scale(source * 1, 11 * 3 / 14, backward)[0].sum().backward()

    assert source.grad.dtype == dtype
    assert torch.equal(source.grad, torch.full((2,), 11 * 3 / 14, dtype=dtype))


def test_a_gradient_of_a_gradient_is_refused(backward):
    """It would be weighted non-linearly; the error names the explicit form."""
    x = leaf()
    layer = hooked(nn.Linear(2, 1).double(), 2.0, backward)

    with pytest.raises(RuntimeError, match=r"weighting='loss'.*balancer\.weight\(loss\)"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@dataclass
class Holder:
    inner: torch.Tensor


class Unpack(nn.Linear):
    def forward(self, x):
        return super().forward(x.inner if isinstance(x, Holder) else x)


@pytest.mark.parametrize(
    "again",
    [lambda y: y, lambda y: torch.softmax(y, 1) * 2, Holder],
    ids=["directly", "through operations", "in a dataclass"],
)
@pytest.mark.parametrize("weight", [2.0, 0.0])
def test_an_output_fed_back_is_weighted_once(backward, again, weight):
    """Beside a loss on the first output itself, which reaches the model by another way."""
    torch.manual_seed(0)
    plain = Unpack(2, 2).double()
    ours = hooked(copy.deepcopy(plain), weight, backward)
    x = torch.ones(3, 2, dtype=torch.float64)

    for layer in (plain, ours):
        once = layer(x)
        (layer(again(once)) ** 2).sum().add((once**3).sum()).backward()

    assert torch.allclose(ours.weight.grad, weight * plain.weight.grad, rtol=1e-14)


def test_an_output_that_went_through_a_strange_layer_is_refused(backward):
    """Nobody knows the weight of parameters between two balanced forwards."""
    layer, between = hooked(nn.Linear(2, 2), 2.0, backward), nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"without other parameters in.*Prepare that layer too"):
        layer(between(layer(torch.ones(1, 2))))


def test_tensors_that_nobody_can_weight_are_refused(backward):
    """As in a distribution: part of the gradient would be left as it is."""

    class Gaussian(nn.Linear):
        def forward(self, x):
            mean = super().forward(x)
            return mean, torch.distributions.Normal(mean, 1.0)

    with pytest.raises(ValueError, match="a Normal with tensors that need a gradient"):
        hooked(Gaussian(2, 2), 2.0, backward)(torch.ones(1, 2))


def test_a_detached_output_may_be_fed_back(backward):
    """As in sampling and rollouts without a gradient."""
    layer = hooked(nn.Linear(2, 2), 2.0, backward)

    layer(layer(torch.ones(1, 2)).detach()).sum().backward()

    assert layer.weight.grad is not None


def test_inputs_with_a_history_of_their_own_are_fine(backward):
    """Another model's output is none of ours."""
    layer = hooked(nn.Linear(2, 2), 2.0, backward)
    encoder = nn.Linear(2, 2)

    layer(encoder(torch.ones(1, 2))).sum().backward()

    assert encoder.weight.grad is not None
    assert not feeds_back([encoder(torch.ones(1, 2))], "Linear")


def test_an_output_without_a_gradient_is_refused_in_training(backward):
    """Nothing could be weighted there; the error says what to do."""
    layer = hooked(nn.Sequential(nn.Linear(2, 2), Detached()), 2.0, backward)

    with pytest.raises(ValueError, match=r"return a tensor that needs a gradient.*Unfreeze"):
        layer(torch.ones(1, 2))


def test_a_frozen_model_may_look_at_data(backward):
    """As a critic does while its generator trains: there is no gradient to be weighted."""
    layer = hooked(nn.Linear(2, 1), 2.0, backward).requires_grad_(False)
    made = torch.ones(1, 2, requires_grad=True)

    seen = layer(torch.ones(1, 2))
    layer(made).sum().backward()

    assert not seen.requires_grad
    assert torch.equal(made.grad, 2.0 * layer.weight)


def test_evaluation_is_left_alone(backward):
    """Without gradients, and outside a step, the output is the very same object."""
    keeper = hooked(nn.Identity(), 2.0, backward)
    idle = hooked(nn.Identity(), None, backward)
    x = leaf()

    with torch.no_grad():
        assert keeper(x) is x
    assert idle(x) is x


def test_a_copy_of_the_model_leaves_the_run_behind(backward, ended):
    """For averaged weights and for `torch.save(model)`: the copy is a plain model."""
    layer = hooked(nn.Linear(2, 2), 2.0, backward)
    written = io.BytesIO()
    torch.save(layer, written)
    written.seek(0)
    copies = [copy.deepcopy(layer), torch.load(written, weights_only=False)]

    for made in copies:
        made(torch.ones(1, 2)).sum().backward()
        assert torch.equal(made.bias.grad, torch.ones(2))
        assert any(getattr(hook, "func", None) is inert for hook in made._forward_hooks.values())
    assert not ended


def scaled(output):
    """Return an output as a forward of weight 2 returns it."""
    return scale(output, 2.0, Backward(Told([])))[0]


@pytest.mark.parametrize(
    "hide",
    [
        lambda mean: Independent(Normal(mean, 1.0), 1),
        lambda mean: Independent(TransformedDistribution(Normal(mean, 1.0), [TanhTransform()]), 1),
        lambda mean: SimpleNamespace(scales=[mean]),
        lambda mean: SimpleNamespace(inner=SimpleNamespace(mean=mean)),
        lambda mean: deque([mean]),
    ],
    ids=["a distribution's base", "two deep", "a list of an object", "an object's own", "a deque"],
)
def test_tensors_hidden_deep_are_refused(hide):
    """Beside another tensor that is weighted, too."""
    mean = torch.ones(1, 2, requires_grad=True)

    with pytest.raises(ValueError, match="with tensors that need a gradient"):
        scaled((mean, hide(mean)))


def test_what_hides_no_gradient_is_passed_on():
    """As what a model has sampled."""
    kept = SimpleNamespace(ids=[torch.ones(1)], name="sampled"), deque([torch.ones(1)]), {1}

    given = scaled(kept)

    assert all(one is other for one, other in zip(given, kept, strict=True))


@pytest.fixture(scope="module")
def found():
    """Errors of gradients in fp64, or what was raised, by case, on rank 0 of two."""
    return run_workers(2, found_in)[0]


@pytest.mark.cluster
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_one_process(found, case):
    """1e-12: `logits /= T`, and `out[mask] = 0`."""
    assert found[case] <= 1e-12


@pytest.mark.cluster
@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused(found, case):
    """A layer may have saved its output for the backward, which would read the changed one."""
    ours, theirs = found[case]

    assert "in-place" in theirs or "inplace" in theirs
    assert "in-place" in ours or "inplace" in ours


@pytest.mark.cluster
@pytest.mark.parametrize("case", OURS)
def test_outputs_that_share_memory_are_refused_with_the_remedy(found, case):
    """To change one changes the other, of which its gradient would not know."""
    ours, theirs = found[case]

    assert not theirs
    assert "evenstep" in ours.lower()
    assert "clone" in ours.lower()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def no_waits():
    """Let torch raise where the host waits for the device; at the end, wait for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def seen(values, device, dtype=torch.float32):
    """Return what a look leaves to be told: whether it was finite, and half precision."""
    tensor, looks = torch.tensor(values, dtype=dtype, device=device), []
    with no_waits() if device == "cuda" else nullcontext():
        look_at(tensor, looks)
    told = [(math.isfinite(look.values()[0]), look.is_half) for look in looks]
    return [one for one in told if not one[0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_seen(bad, dtype, device):
    """Among others that are finite."""
    assert seen([1.0, bad, -2.0], device, dtype) == [(False, False)]


@pytest.mark.parametrize("device", DEVICES)
def test_infinities_of_both_signs_are_seen(device):
    """Their sum is no number."""
    assert seen([math.inf, -math.inf], device, torch.float16) == [(False, True)]


@pytest.mark.parametrize("device", DEVICES)
def test_large_numbers_of_half_precision_are_finite(device):
    """Though their sum is none of half precision."""
    assert seen([60000.0] * 4, device, torch.float16) == []


def test_nothing_is_an_empty_sum():
    """A batch without samples has a gradient without numbers."""
    assert seen([], "cpu") == []


@pytest.mark.parametrize(
    "shape", [(0,), (0, 5), (5, 0), (3,), (7, 3), (3, 40, 900), (2, 3, 70000), (1, 70000)]
)
def test_a_scale_is_the_sum_of_absolute_values_by_rows(shape):
    """However large outputs are cut, so that no copy of all of one is made."""
    torch.manual_seed(0)
    gradient, looks = torch.randn(shape), []
    look_at(gradient, looks, output=0)
    by_row = [float(row.abs().double().sum()) for row in gradient]
    scale, squares = looks[0].values()

    assert scale == pytest.approx(sum(by_row), abs=1e-12)
    assert squares == pytest.approx(sum(one**2 for one in by_row), abs=1e-12)
