"""Compiled models: exact, one graph for all sizes, clean times, and never silently uncompiled."""

import copy
import pickle
from statistics import median

import pytest
import torch
from torch import nn

from evenstep.events import StepMeasured
from evenstep.exceptions import EvenstepWarning
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime
from evenstep.torch._model._compiled import OuterHooks, compiled_parts, hooks_on, is_compiled
from evenstep.torch._step._reporter import CompileWatch

from .._tiers import Groups, slow_but
from .compiled_runs import (
    FORMS,
    IN_PARTS,
    QUIET,
    SHARDED,
    all_forms,
    all_slow,
    fresh,
    numbered,
    refusals,
)
from .models import Mlp, WithBuffers

FIRST = ("DDP(torch.compile(model))",)
LATE = ("compile() of what was prepared", "torch.compile of what was prepared")


@pytest.fixture(scope="module")
def forms():
    """What the ways of compiling lead to, on two ranks."""
    return Groups(FIRST, [*FORMS, *IN_PARTS], lambda names: run_workers(2, all_forms, names)[0])


@pytest.fixture(scope="module")
def slow():
    """What else is slow, in one cluster: what one case has loaded, the next one has."""
    return run_workers(2, all_slow)[0]


@pytest.fixture(scope="module")
def times(slow):
    """The times that are measured in every way of compiling."""
    return slow["times"]


@pytest.fixture(scope="module")
def found(slow):
    """What becomes of sizes that cost graphs."""
    return slow["limits"]


@pytest.mark.cluster
@pytest.mark.parametrize("form", slow_but(FIRST, [*FORMS, *IN_PARTS]))
def test_every_way_of_compiling_is_exact(forms, form):
    """Weights that change at every step enter no graph, and each backward is told of once."""
    assert forms[form]["error"] <= 1e-12
    assert forms[form]["callbacks"] == 1.0


@pytest.mark.cluster
@pytest.mark.parametrize("form", slow_but(FIRST, [*FORMS, *SHARDED]))
def test_all_sizes_share_a_graph(forms, form):
    """A model compiled after it was prepared is found out by its first graph, of a fixed size."""
    assert forms[form]["graphs"] <= (2 if form in LATE else 1)


@pytest.mark.cluster
@pytest.mark.parametrize("form", slow_but(FIRST, [f for f in FORMS if f != LATE[1]]))
def test_no_hook_breaks_a_graph(forms, form):
    """Not even those below the outermost module; only what is compiled late and anew has a seam."""
    assert forms[form]["breaks of ours"] == []


@pytest.mark.cluster
@pytest.mark.parametrize("form", slow_but(FIRST, FORMS))
def test_nothing_is_left_on_the_model(forms, form):
    """A closed balancer takes its calls back, from around a compiled model too."""
    assert forms[form]["left"] == []


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("form", FORMS)
def test_own_time_is_clean(times, form):
    """Of the rank that waits for the other: for its buffers in the forward, or in the backward."""
    assert median(times[form]["in time"]) < 0.03
    assert median(times[form]["late"]) >= 0.06
    assert 0 not in times[form]["steps"]  # in which it was compiled


@pytest.mark.slow
@pytest.mark.cluster
def test_sizes_change_without_a_recompilation(found):
    """torch would raise at the first one, and at a break in the graph."""
    num_plans, num_graphs, is_dynamic = found["marked"]

    assert num_plans > 5
    assert num_graphs == 1
    assert is_dynamic


@pytest.mark.slow
@pytest.mark.cluster
def test_by_count_one_shape_is_compiled_once(found):
    """For its very size: the choice where a dynamic dimension costs speed, and for CUDA graphs."""
    num_plans, num_graphs, is_dynamic = found["by count"]

    assert num_plans > 2
    assert num_graphs == 1
    assert not is_dynamic


@pytest.mark.slow
@pytest.mark.cluster
def test_sizes_are_held_before_torch_gives_up(found):
    """A model that needs a graph for each size gets eight; here torch raises at the ninth."""
    sizes = found["sizes"]
    (held,) = found["held"]
    told = [text for text in found["warnings"] if "torch would run it uncompiled" in text]

    assert len(set(sizes[held.step + 2 :])) == 1
    assert found["graphs"] <= 8
    assert len(set(sizes)) >= 4  # it was balanced meanwhile
    assert len(told) <= 1  # on the rank that has that many; the other is told by the event


@pytest.mark.slow
@pytest.mark.cluster
def test_single_samples_are_not_planned(found):
    """One would cost a graph; two do not, in a model with batch normalisation either."""
    assert found["smallest"] == (14, 2)
    assert found["smallest, normed"] == (14, 2)
    assert found["graphs, normed"] == 1


@pytest.mark.slow
@pytest.mark.cluster
def test_a_compiler_slower_than_the_deadline_loses_nobody(slow):
    """The others wait in their collective; heartbeats go on, and no plan follows from it."""
    assert slow["compiler"] == [1, 2, 3, 5, 6, 7]


@pytest.mark.cluster
def test_what_cannot_be_timed_is_refused():
    """At `prepare`, or before the first step if it is compiled later; with the remedy."""
    texts = run_workers(2, refusals)[1]

    for case in ("static", "static in place", "static, compiled late"):
        assert "Compile the model inside of DDP, or leave out `static_graph`" in texts[case]
    assert "Leave the setting at True" in texts["reduced inside"]
    assert "be given each model once" in texts["twice"]


def train(model, *, after=None, disturb=None, num_steps=8):
    """Train in this process; return the steps that were measured."""
    steps = []

    def hook(event):
        if isinstance(event, StepMeasured):
            steps.append(event.step)

    with Balancer(runtime=Runtime(line_every=None, hooks=(hook,))) as balancer:
        model, loader = balancer.prepare(model, numbered(8 * num_steps))
        model = model if after is None else after(model)
        for number, (x, _) in enumerate(loader):
            if disturb is not None and number == 4:
                disturb(model)
            model(x).mean().backward()
    return steps


def test_a_step_in_which_something_is_compiled_is_no_timing():
    """Be it in the middle of a run, and after torch has forgotten all, our watch too."""
    fresh()
    model = torch.compile(Mlp().double(), backend="aot_eager")

    steps = train(model, disturb=lambda _: torch._dynamo.reset())

    assert steps == [1, 2, 3, 5, 6, 7]


@pytest.mark.slow
@pytest.mark.cluster
def test_what_is_not_compiled_is_not_touched(found):
    """Batches carry no marks, and every step counts."""
    fresh()

    assert train(Mlp().double()) == list(range(8))
    assert found["marked without need"] == [False] * 3


@pytest.mark.parametrize("where", ["whole", "part", "part in place"])
def test_inputs_are_marked_where_they_enter_what_is_compiled(where):
    """Also where only a part of the model is, and after the batch was moved."""
    fresh()
    model, seen = WithBuffers().double(), []
    if where == "whole":
        model = torch.compile(model, backend="eager")
    elif where == "part":
        model.inner = torch.compile(model.inner, backend="eager")
    else:
        model.inner.compile(backend="eager")
    original = model.get_submodule("_orig_mod") if where == "whole" else model
    mark = CompileWatch.mark

    class Spy(CompileWatch):
        varies = property(lambda self: True, lambda self, value: None)  # not so in one process

        def mark(self, module, inputs, keywords):
            mark(self, module, inputs, keywords)
            seen.append(inputs[0])

    with Balancer(runtime=QUIET) as balancer:
        balancer._parts.watch = Spy()
        model, loader = balancer.prepare(model, numbered(16))
        for x, _ in loader:
            model(x.clone()).mean().backward()
    assert len(seen) == 2
    assert all(x._dynamo_weak_dynamic_indices == {0} for x in seen)
    assert not list(hooks_on(original))


def test_a_seam_of_ours_names_the_remedy():
    """Where the user forbids breaks and compiles what was prepared."""
    fresh()

    with pytest.raises(RuntimeError, match=r"Compile before `prepare`"):
        train(Mlp().double(), after=lambda m: torch.compile(m, fullgraph=True, backend="eager"))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_leave_the_run_behind(copied):
    """The calls around a model that was compiled in place, and hooks on one that was not."""
    fresh()
    model = WithBuffers().double()
    model.inner.compile(backend="eager")
    keys = list(model.state_dict())
    with Balancer(runtime=QUIET) as balancer:
        model, _ = balancer.prepare(model, numbered(16))
        other = copied(model)
        assert list(model.state_dict()) == keys

    assert list(compiled_parts(model)) == [model.inner]
    assert not list(hooks_on(other))
    assert not is_compiled(other.inner)  # torch's own way with copies


def test_a_model_can_be_compiled_in_place_between_steps():
    """Once more and otherwise, too: the calls move to where they belong."""
    fresh()
    model, calls = Mlp(), []
    around = OuterHooks(
        model,
        before=[lambda module, inputs, keywords: calls.append("before")],
        after=[lambda module, inputs, keywords, output: output + 1],
    )
    plain = model(torch.ones(2, 6))
    around.place()
    for change in (None, "eager", "aot_eager"):
        if change is not None:
            model.compile(backend=change)
            around.place()

        assert torch.allclose(model(torch.ones(2, 6)), plain + 1)
    around.release()

    assert calls == ["before"] * 3
    assert torch.allclose(model(torch.ones(2, 6)), plain)
    assert is_compiled(model)


class Power(nn.Module):
    """One piece of code; and a graph for each exponent."""

    def __init__(self, exponent):
        super().__init__()
        self.exponent = exponent

    def forward(self, x):
        return x**self.exponent


def watch_of(limit, sizes, *, num_models=1):
    """Return a watch that has seen a fixed-shape model compiled for ``sizes``."""
    fresh()
    models = [
        torch.compile(Power(exponent), dynamic=False, backend="eager")
        for exponent in range(num_models)
    ]
    watch = CompileWatch()
    with torch._dynamo.config.patch(recompile_limit=limit):
        for size in sizes:
            watch.begin_step(0)
            for model in models:
                watch.num_samples = size
                model(torch.ones(size, 2))
                watch.num_samples = 0
            if watch.holds:
                break
    return watch


@pytest.mark.parametrize(("limit", "count"), [(8, 6), (4, 2), (2, 2)])
def test_the_watch_leaves_a_reserve(limit, count):
    """Two more graphs, as far as the limit allows that."""
    sizes = range(3, 3 + count)
    before, after = watch_of(limit, sizes[:-1]), watch_of(limit, sizes)
    with pytest.warns(EvenstepWarning, match=rf"At {limit} times torch would run it uncompiled"):
        after.begin_step(0)
    after.begin_step(0)  # and says no more
    before.close()
    after.close()

    assert not before.holds
    assert after.holds


def test_many_models_of_one_size_are_no_storm():
    """They may share code, and with it the count of its compilations."""
    watch = watch_of(8, [3], num_models=7)
    watch.close()

    assert not watch.holds
