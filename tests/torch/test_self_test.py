"""A torch that does not behave as evenstep relies on is refused, and looking leaves no trace."""

import random
import warnings

import numpy as np
import pytest
import torch

from evenstep.exceptions import EvenstepWarning
from evenstep.torch._model._self_test import (
    at_end_of_backward,
    backward_number,
    check_call,
    check_engine,
    warn_if_newer,
)


def test_the_installed_torch_behaves():
    """Otherwise nothing here would run."""
    check_engine()


def at_once(callback):
    """An engine that does not wait for the end."""
    callback()


class Backwards:
    """An engine that calls what was asked for last first."""

    def __init__(self):
        self.asked = []

    def __call__(self, callback):
        self.asked.append(callback)
        at_end_of_backward(lambda: self.asked.pop()())


class Deaf:
    """An engine that does not hear what is asked for inside of a callback."""

    def __init__(self):
        self.calling = False

    def __call__(self, callback):
        if not self.calling:
            at_end_of_backward(lambda: self.call(callback))

    def call(self, callback):
        self.calling = True
        callback()
        self.calling = False


def gone(*_):
    """An engine without the private name."""
    raise AttributeError("type object 'Variable' has no attribute '_execution_engine'")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"queue": at_once}, "must call back in the order"),
        ({"queue": Backwards()}, "must call back in the order"),
        ({"queue": Deaf()}, "must call back in the order"),
        ({"queue": gone}, "got AttributeError: type object 'Variable'"),
        ({"task": gone}, "got AttributeError: type object 'Variable'"),
        ({"task": lambda: 0}, "must number backwards"),
        ({"task": lambda: -1}, "must number backwards"),
        ({"task": lambda: min(backward_number(), 0)}, "must number backwards"),
    ],
)
def test_an_engine_that_does_otherwise_is_refused(broken, words):
    """With the version, what is expected, what was found and the remedy."""
    with pytest.raises(ValueError, match=words) as caught:
        check_engine(**broken)

    assert str(caught.value).startswith(f"`torch {torch.__version__}` must")
    assert "EVENSTEP=off" in str(caught.value)


def test_a_module_that_calls_past_the_place_of_compile_is_refused():
    """Or hooks around a compiled model would not run."""
    check_call()
    with pytest.raises(ValueError, match="must call what stands in a module's `elsewhere`"):
        check_call("elsewhere")


@pytest.mark.parametrize("version", ["2.14.1+cu130", "2.14.0a0+git1a2b", "3.0.0"])
def test_a_torch_newer_than_any_that_was_tested_is_warned_of(version):
    """With its version, and how to find out whether it matters."""
    with pytest.warns(EvenstepWarning, match=r"is newer than 2\.13, .*EVENSTEP=off") as caught:
        warn_if_newer(version)

    assert str(caught[0].message).startswith(f"torch {version} ")


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.2", "2.9.1", "nightly"])
def test_other_versions_are_let_be(version):
    """The newest that was tested, older ones, and what has no number."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_newer(version)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_looking_leaves_no_trace(mode):
    """Random states, the grad mode, the default device and CUDA stay as they are."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    on_cuda = torch.cuda.is_initialized()
    with mode(), torch.device("meta"):
        held = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        check_engine()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == held
        assert torch.empty(()).device.type == "meta"

    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert torch.cuda.is_initialized() == on_cuda
