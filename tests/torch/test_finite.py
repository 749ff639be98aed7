"""A look at a gradient tells whether all of it is finite, without a wait for a device."""

import math
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch

from evenstep.torch._step._output_looks import look_at

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
