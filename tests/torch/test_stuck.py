"""Where a thread of torch's is: on the user's own line, in a collective, or in a compiler."""

import threading
import traceback

import pytest
import torch
import torch.distributed as dist

from evenstep.testing import run_workers
from evenstep.torch._exchange._stuck import is_in_collective, num_collectives, place_of


def test_a_place_is_the_users_own_line():
    """Past the frames of Python's library, torch and evenstep."""
    entered, gate, number = threading.Event(), threading.Event(), []

    def users_function():
        number.append(threading.get_ident())
        entered.set()
        gate.wait()  # its innermost frame lies in threading.py

    thread = threading.Thread(target=users_function)
    thread.start()
    entered.wait(5)
    place = place_of(number[0])
    gate.set()
    thread.join(5)

    assert place.text.startswith("at ")
    assert "test_stuck.py:" in place.text
    assert place.text.endswith(" in users_function")
    assert not place.in_collective
    assert not place.compiling


def test_a_backend_at_work_is_compiling():
    """Dynamo calls it while it converts a frame."""
    seen = []

    def backend(graph, inputs):
        seen.append(place_of(threading.get_ident()))
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))

    assert [place.compiling for place in seen] == [True]


def test_who_handles_the_error_of_a_backward_is_in_none():
    """It may be saving a checkpoint, which is not to be ended."""

    def fail(grad):
        raise RuntimeError("port 4711")

    x = torch.ones(3, requires_grad=True)
    x.register_hook(fail)
    try:
        x.sum().backward()
    except RuntimeError as error:
        last = traceback.extract_tb(error.__traceback__)[-2]
        seen = is_in_collective(threading.get_ident())

    assert last.filename.endswith("torch/autograd/graph.py")  # where it would be in one
    assert not seen


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_that_runs_is_not_compiling(backend):
    """Though files of the compiler's are on its stack."""
    seen = []

    @torch.compiler.disable
    def look():
        seen.append(place_of(threading.get_ident()))

    def forward(x):
        look()
        return look_inside(x) + 1

    @torch.library.custom_op(f"evenstep_tests::look_{backend}", mutates_args=())
    def look_inside(x: torch.Tensor) -> torch.Tensor:
        seen.append(place_of(threading.get_ident()))
        return x.clone()

    look_inside.register_fake(torch.empty_like)
    compiled = torch.compile(forward, backend=backend)
    compiled(torch.ones(3))
    seen.clear()
    compiled(torch.ones(3))

    assert [place.compiling for place in seen] == [False, False]


@pytest.mark.cluster
def test_a_group_is_known_by_what_its_maker_calls_it_or_by_its_ranks():
    """A warning names it: "undefined" would help no person."""
    for names in run_workers(2, _groups):
        assert [name.split(" (")[1] for name in names] == ["default_pg)", "ranks 0, 1)", "halves)"]


def _groups(rank):
    groups = dist.new_group([0, 1]), dist.new_group([0, 1], group_desc="halves")
    found = [name for name in num_collectives() if name.startswith("gloo group")]
    assert len(groups) == 2
    return found
