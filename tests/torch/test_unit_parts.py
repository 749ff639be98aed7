"""Units one by one: how they are counted, summed and waited for; two of them in one loss."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep._torch_clock import HostClock
from evenstep.policies import Fixed
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds, Runtime, check_loss
from evenstep.torch._data._protocols import MicroBatch, StepStart
from evenstep.torch._data._step import with_units
from evenstep.torch._memory import Layout, Retries
from evenstep.torch._model._models import PreparedModels
from evenstep.torch._model._units import unit_counter
from evenstep.torch._model._weighting import Backward, scale
from evenstep.torch._step._marks import Recorder, StepMeter
from evenstep.torch._step._reductions import ForwardRecord
from evenstep.torch._step._reporter import CompileWatch
from evenstep.torch._step._tickets import Match
from evenstep.torch._step._tracker import StepTracker

from .unit_runs import QUIET
from .units import Case, flat_gradient, pairs, reference

NUM_STEPS, GLOBAL, LENGTH, VOCABULARY, BETA = 4, 16, 12, 11, 0.1
Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Scores(nn.Module):
    """Scores of the next token, for chosen and rejected answers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY))

    def forward(
        self, chosen: torch.Tensor, rejected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(chosen.clamp(min=0)), self.inner(rejected.clamp(min=0))


def answers() -> TensorDataset:
    """Chosen and rejected answers of unlike lengths, padded with -100."""
    generator = torch.Generator().manual_seed(1)
    shape = 2, NUM_STEPS * GLOBAL, LENGTH
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (*shape[:2], 1), generator=generator)
    return TensorDataset(*tokens.masked_fill(torch.arange(LENGTH) >= lengths, -100))


def loss_of(*batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of scores and answers: a mean over pairs beside one over tokens."""
    pairs, tokens, count = terms(*batch)
    return pairs + tokens / count


def terms(
    of_chosen: torch.Tensor, of_rejected: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor
) -> Terms:
    """Return the mean over pairs, the sum over the tokens of what was chosen, and their number."""
    good, bad = (
        -functional.cross_entropy(scores[:, :-1].mT, answer[:, 1:], reduction="none")
        for scores, answer in ((of_chosen, chosen), (of_rejected, rejected))
    )
    margin = BETA * (good.sum(1) - bad.sum(1))
    return -functional.logsigmoid(margin).mean(), -good.sum(), (chosen[:, 1:] != -100).sum()


def plain(balancer: Balancer, pairs: torch.Tensor, tokens: torch.Tensor, count: torch.Tensor):
    return pairs + tokens / count


def one_weighted(
    balancer: Balancer, pairs: torch.Tensor, tokens: torch.Tensor, count: torch.Tensor
):
    dist.all_reduce(count)
    return balancer.weight(pairs) + tokens * dist.get_world_size() / count


FORMS: dict[str, tuple[Callable[..., torch.Tensor], str, object]] = {
    "one of them weighted": (one_weighted, "loss", "samples"),
    "by samples": (plain, "output", "samples"),
    "by tokens": (plain, "output", lambda batch: (batch[0][:, 1:] != -100).sum()),
}


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def errors(rank: int) -> dict[str, float]:
    """Return the largest relative error over the steps against one process, by form."""
    return {name: _error(*form) for name, form in FORMS.items()}


def _error(form: Callable[..., torch.Tensor], weighting: str, unit: object) -> float:
    torch.manual_seed(0)
    alone = Scores().double()
    torch.manual_seed(0)
    model, worst = Scores().double(), 0.0
    runtime = Runtime(line_every=None)
    with Balancer(policy=Fixed((11, 5)), unit=unit, runtime=runtime) as balancer:
        balanced, loader = balancer.prepare(
            DistributedDataParallel(model),
            DataLoader(answers(), batch_size=GLOBAL // 2),
            weighting=weighting,
        )
        for whole, batch in zip(DataLoader(answers(), GLOBAL), loader, strict=True):
            alone.zero_grad()
            model.zero_grad()
            loss_of(*alone(*whole), *whole).backward()
            form(balancer, *terms(*balanced(*batch), *batch)).backward()
            wanted = gradient(alone)
            worst = max(worst, float((gradient(model) - wanted).norm() / wanted.norm()))
    return worst


class Clock:
    """A clock that stands still."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


class LateUnits:
    """A sum that arrives 5 seconds after it is asked for."""

    def __init__(self, clock):
        self.clock = clock

    def add(self, step, units):
        class Sum:
            total = None

        return Sum()

    def wait(self, unit_sum):
        self.clock.now_s += 5.0
        unit_sum.total = 8.0


class Idle:
    """An exchange that only keeps what is reported."""

    stopping = False
    wrong = None  # all ranks go the same way

    def __init__(self, clock):
        self.units = LateUnits(clock)
        self.lost_ranks = self.watch = self  # which keep what a step sets
        self.reports = []

    def report(self, step, made, **_):
        self.reports += made()[-1].reports

    @property
    def divergence(self):
        return self

    def send(self, reduced):
        """Nobody is told."""


def test_waiting_for_others_units_is_no_time_of_ones_own():
    """A rank is not taken for slow because another one's data came late."""
    clock = Clock()
    exchange = Idle(clock)
    conductor = StepTracker()
    recorder = Recorder(StepMeter(HostClock(clock)))
    conductor.open(exchange, recorder, CompileWatch(), world_size=2)
    conductor.begin_step(StepStart(0, 4, 8, data_s=0.0, units=2.0))
    conductor.begin_forward(0, MicroBatch(None, 4).counted(lambda batch: 2.0), is_last=True)
    use = conductor.begin_use(0, [], reduces=None)
    clock.now_s += 1.0
    conductor.end_use()
    assert clock.now_s == 1.0  # the forward has what it needs

    conductor.backward_begins()
    assert use.weight() == 2.0 * 2 / 8.0
    conductor.backward_done([use])
    conductor.end_epoch()

    assert exchange.reports[0].compute_s == pytest.approx(1.0)


def train_alone(case, **settings):
    """Return each step's gradient in this process alone."""
    torch.manual_seed(0)
    found = []
    with Balancer(policy=Fixed((24,)), runtime=QUIET, unit=case.unit, **settings) as balancer:
        model = case.model().double()
        model, loader = balancer.prepare(model, DataLoader(case.data(), batch_size=24))
        for step in loader.steps():
            model.zero_grad()
            for batch in step:
                case.loss(model, batch).backward()
            found.append(flat_gradient(model))
    return found


def test_one_process_with_micro_batches_counts_units_too():
    """And a step without any learns nothing, rather than a NaN."""
    case = Case(data=lambda: pairs(range(24, 48)))

    ours = train_alone(case, bounds=Bounds(max=5))

    for mine, (theirs, _) in zip(ours, reference(case), strict=True):
        assert (mine - theirs).norm() <= 1e-12 * (theirs.norm() or 1.0)


def test_parts_of_a_micro_batch_are_counted_anew():
    """However it is cut, and a stand-in has none."""
    counter = unit_counter(lambda batch: float(sum(batch)))

    parts, units = with_units([MicroBatch([1, 2, 3], 3), MicroBatch([5], 0)], counter)

    assert [part.units for part in parts] == [6.0, 0.0]
    assert units == 6.0
    assert with_units([MicroBatch([1], 1)], None)[1] is None


class Forwards:
    """Hears of forwards, of which those of more than 2 samples run out of memory."""

    def __init__(self):
        self.units = []

    def begin_forward(self, step, part, *, is_last):
        self.units.append(part.units)

    def ran_out_of_memory(self, limit, *, again):
        self.units.clear()  # it was in the forward of the first part

    def loss(self, batch):
        if len(batch) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return batch.sum() / (batch != 0).sum()


def test_what_is_cut_for_memory_is_weighted_by_units_still():
    """Each part by its own, and the mean loss of the step as well."""
    batch = torch.tensor([1.0, 0.0, 5.0, 0.0, 0.0, 3.0])
    forwards = Forwards()
    replay = Retries(PreparedModels(), forwards, layout=lambda: Layout(torch.ones))
    parts, _ = with_units([MicroBatch(batch, 6)], unit_counter(lambda x: (x != 0).sum()))

    loss = replay.run(0, parts, forwards.loss, lambda loss: None)

    assert sum(forwards.units) == 3.0
    assert len(forwards.units) > 2
    assert float(loss) == pytest.approx(3.0)


IDS = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
COPIED = torch.where(MASK == 1, IDS, -100)
OTHERS = torch.tensor([[1, -100, 2, -100], [-100, 3, -100, -100]])


class Kind(torch.nn.Module):
    """A model of transformers, as far as it is asked."""

    def __init__(self, loss_type, *, is_encoder_decoder=False):
        super().__init__()
        self.loss_type = loss_type
        self.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)


GPT2LMHeadModel = type("GPT2LMHeadModel", (Kind,), {})  # transformers knows no loss type of it
CAUSAL, MASKED = Kind("ForCausalLM"), Kind("ForMaskedLM")


@pytest.mark.parametrize(
    ("model", "shifts"),
    [
        (CAUSAL, True),
        (torch.nn.Sequential(CAUSAL), True),
        (GPT2LMHeadModel(None), True),
        (Kind("ForConditionalGeneration"), True),
        (Kind("ForConditionalGeneration", is_encoder_decoder=True), False),
        (MASKED, False),
        (Kind("ForTokenClassification"), False),
    ],
)
def test_the_model_tells_whether_labels_are_shifted(model, shifts):
    """A task of copying has labels like a causal model's, and no batch tells them apart."""
    counter = unit_counter("tokens", lambda: [model])

    assert counter({"input_ids": IDS, "labels": COPIED}) == (3 + 1 if shifts else 4 + 2)
    assert counter({"input_ids": IDS, "labels": OTHERS}) == (2 if shifts else 3)


@pytest.mark.parametrize("models", [(), (Kind(None),), (Kind("l1"),), (CAUSAL, MASKED)])
def test_where_no_model_tells_it_is_refused(models):
    """Once the batch has labels, with the functions to write instead."""
    counter = unit_counter("tokens", lambda: models)

    assert counter({"input_ids": IDS, "attention_mask": MASK}) == 6
    with pytest.raises(ValueError, match=r"shifts labels.*\[\.\.\., 1:\]"):
        counter({"input_ids": IDS, "labels": COPIED})


@pytest.mark.parametrize(
    ("batch", "units"),
    [
        ({"input_ids": IDS, "labels": OTHERS}, 3),
        ({"input_ids": IDS, "labels": COPIED, "shift_labels": OTHERS}, 3),
        ({"input_ids": IDS, "labels": OTHERS[:, :3]}, 3),  # encoder and decoder
        ({"input_ids": IDS, "labels": torch.tensor([1, -100])}, 1),  # one a sample
        ({"pixel_values": torch.zeros(2, 3), "labels": torch.tensor([0.5, 1.5])}, 2),
        ({"input_ids": IDS, "attention_mask": MASK}, 6),
        (UserDict(labels=OTHERS), 3),
    ],
    ids=["masked", "shifted", "seq2seq", "class", "regression", "mask", "kin of a dict"],
)
def test_tokens_are_what_the_model_is_asked_for(batch, units):
    """By a model that does not shift its labels: each of them but -100."""
    assert unit_counter("tokens", lambda: [MASKED])(batch) == units


@pytest.mark.parametrize("batch", [(IDS, COPIED), {"input_ids": IDS}, {"labels": [1]}, 3])
def test_a_batch_without_targets_by_name_is_refused(batch):
    """With a function to write instead."""
    with pytest.raises(ValueError, match=r"labels.*Balancer\(unit=lambda batch"):
        unit_counter("tokens")(batch)


@pytest.mark.parametrize("given", [-1, math.nan, math.inf, torch.ones(2), "many", None])
def test_a_count_that_is_none_is_refused(given):
    """A negative or infinite weight would train, and wrongly."""
    with pytest.raises(ValueError, match="return one finite number of at least 0"):
        unit_counter(lambda batch: given)(None)


@pytest.mark.parametrize("given", [3, 3.0, torch.tensor(3), torch.tensor([3.0]), True + 2])
def test_a_count_may_be_any_number(given):
    """Of Python or of torch."""
    assert unit_counter(lambda batch: given)(None) == 3.0


@pytest.mark.parametrize("unit", ["words", None, 5])
def test_a_unit_that_is_none_is_refused(unit):
    """At once, by name."""
    with pytest.raises(ValueError, match=r'must be "samples", "tokens" or a function of a batch'):
        Balancer(unit=unit)


def test_a_sum_needs_no_unit():
    """Counting twice would be wrong, so it is said."""
    with pytest.raises(ValueError, match=r"`loss_reduction=\"sum\"`.*leave `unit` out"):
        Balancer(unit="tokens", loss_reduction="sum")


class Deaf:
    """Is told of backwards, and does nothing."""

    def backward_begins(self): ...

    def backward_done(self, uses): ...

    def reduced(self): ...


@pytest.mark.parametrize("grad", [math.nan, math.inf, 1.0])
def test_a_weight_of_zero_keeps_nan_out(grad):
    """0 * NaN is NaN: a mean over nothing must not reach the others' parameters."""
    source = torch.ones(2, requires_grad=True)
    backward = Backward(Deaf())
    for weight in (0.0, lambda: 0.0):
        source.grad = None
        scale(source * 1, ForwardRecord(Match((), weight), None, weight, 0, None, False), backward)[
            0
        ].backward(torch.full((2,), grad))

        assert torch.equal(source.grad, torch.zeros(2))


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
