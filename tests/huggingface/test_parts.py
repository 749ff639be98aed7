"""The parts between evenstep and Hugging Face, by themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from evenstep.huggingface import balance
from evenstep.huggingface._checks import check_accelerator
from evenstep.huggingface._micro_batches import masked, pieces_of, portions
from evenstep.huggingface._training_data import FirstOf, UnwrappedLoader

from .lengths import packing, rows


class FakeStep:
    """Some micro-batches, and which of them have begun."""

    global_num_samples = 20

    def __init__(self, *sizes: int) -> None:
        self.begun: list[int] = []
        self.micro_batches = [
            SimpleNamespace(
                batch={
                    "input_ids": torch.full((max(size, 1), 4), index),
                    "labels": torch.full((max(size, 1), 4), index),
                },
                num_samples=size,
            )
            for index, size in enumerate(sizes)
        ]

    def __iter__(self) -> Any:
        for index, part in enumerate(self.micro_batches):
            self.begun.append(index)
            yield part.batch


def cut(step: FakeStep, num_portions: int, main_input: str = "input_ids") -> Any:
    batches = [masked(part) for part in step.micro_batches]
    return portions(step, batches, num_portions, main_input=main_input)


@pytest.mark.parametrize("num_forwards", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_portions", [1, 2, 4, 7])
def test_portions_hold_every_forward_once_and_the_last_has_one(num_forwards, num_portions):
    """However many forwards a rank has, Trainer counts the same number of batches."""
    step = FakeStep(*[2] * num_forwards)
    made = cut(step, num_portions)
    counts = [len(list(portion.forwards())) for portion in made]

    assert len(made) == num_portions
    assert sum(counts) == num_forwards
    assert counts[-1] >= 1
    assert max(counts) - min(counts) <= 1
    assert step.begun == list(range(num_forwards))
    assert sum(portion["input_ids"].numel() for portion in made) == 8 * num_forwards


def test_gradients_are_averaged_in_the_last_forward_alone():
    """Before it, whatever the portion, they are only added up."""
    made = cut(FakeStep(3, 3, 1), 2)
    last = [forward.is_last for portion in made for forward in portion.forwards()]

    assert last == [False, False, True]


@pytest.mark.parametrize(("first", "end"), [(0, 1), (1, 3), (2, 5), (0, 5)])
def test_a_piece_of_a_packed_row_is_what_the_collator_makes_of_its_samples(first, end):
    """With where its sequences end; that of the longest may be that of the whole row."""
    samples = rows(5)
    packed = pieces_of(packing()(samples), 5)
    made, expected = packed.cut(first, end), packing()(samples[first:end])

    assert (packed.num, packed.are_samples) == (5, True)
    for name in ("input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q"):
        assert torch.equal(made[name], expected[name])
    assert made["max_length_q"] >= expected["max_length_q"]


def test_a_sample_may_have_several_sequences():
    """As TRL packs a data set: they are no samples. A single one cannot be cut."""
    assert not pieces_of(packing()(rows(5)), 2).are_samples
    assert pieces_of(packing()(rows(1)), 1) is None


def test_lists_and_what_is_in_mappings_are_cut_with_the_rows():
    """As boxes are given to a detector, or two texts to one model; single values stay."""
    batch = {
        "pixels": torch.arange(6).reshape(3, 2),
        "labels": [{"boxes": torch.zeros(n, 4)} for n in (1, 2, 3)],
        "query": {"input_ids": torch.arange(3), "kind": "text"},
        "scale": torch.tensor(2.0),
        "empty": None,
    }
    made = pieces_of(batch, 3).cut(1, 3)

    assert made["pixels"].tolist() == [[2, 3], [4, 5]]
    assert [len(each["boxes"]) for each in made["labels"]] == [2, 3]
    assert made["query"]["input_ids"].tolist() == [1, 2]
    assert (made["query"]["kind"], float(made["scale"]), made["empty"]) == ("text", 2.0, None)


@pytest.mark.parametrize(
    "batch",
    [
        {"graph": object(), "labels": torch.zeros(3)},
        {"text": ["a", "b"], "labels": torch.zeros(3)},
        {"scale": 1.0},
        (torch.zeros(3, 2), torch.zeros(3)),
    ],
    ids=["an object", "a list of another length", "no rows", "a tuple"],
)
def test_what_has_no_rows_is_not_cut(batch):
    """Of a piece of its tensors alone, a model would make nothing, or the same loss."""
    assert pieces_of(batch, 3) is None


def test_a_stand_in_has_no_targets_and_no_tokens():
    """What a rank without samples computes is in no count."""
    step = FakeStep(0)
    (made,) = cut(step, 1)
    (forward,) = made.forwards()

    assert (forward.batch["labels"] == -100).all()
    assert (step.micro_batches[0].batch["labels"] == 0).all()  # as it came, for means over it
    assert made["input_ids"].numel() == 0


def test_pictures_are_counted_without_a_copy():
    """Of a main input in floating point only the number of elements is kept."""
    step = FakeStep(2)
    step.micro_batches[0].batch["pixels"] = torch.zeros(2, 3, 5)
    (made,) = cut(step, 1, "pixels")
    list(made.forwards())

    assert made["pixels"].numel() == 30
    assert made["pixels"].is_meta


def test_a_sampler_cut_short_keeps_its_generator_and_its_epoch():
    """The order can be drawn again, as of the sampler itself."""
    generator = torch.Generator()
    whole = RandomSampler(range(10), generator=generator)
    short = FirstOf(whole, 6)
    generator.manual_seed(1)
    first = list(short)
    generator.manual_seed(1)

    assert len(short) == 6
    assert first == list(whole)[:6]
    assert short.generator is generator
    epochs = DistributedSampler(range(10), num_replicas=1, rank=0)
    FirstOf(epochs, 6).set_epoch(3)
    assert epochs.epoch == 3
    with pytest.raises(AttributeError):
        _ = short._nothing


def test_a_stock_loader_is_rebuilt_with_what_it_had():
    """Data set, order, collate function and the rest; a global batch over the ranks, rounded up."""
    loader = DataLoader(range(10), batch_size=4, sampler=range(10), collate_fn=tuple, timeout=0)
    stock = UnwrappedLoader(loader, accelerator(split_batches=True, num_processes=3))
    again = stock.rebuild()

    assert stock.global_batch_size == 4
    assert again.batch_size == 2
    assert again.collate_fn is tuple
    assert list(again.sampler) == list(range(10))
    assert (
        UnwrappedLoader(loader, accelerator(split_batches=False, num_processes=3))
        .rebuild(times=2)
        .batch_size
        == 8
    )


def accelerator(**settings: Any) -> Any:
    """What is asked of an accelerator."""
    return SimpleNamespace(**{"distributed_type": "NO", "num_processes": 1, **settings})


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_other_kinds_of_training_are_refused(kind):
    """Only DDP, or a single process."""
    with pytest.raises(ValueError, match=f"train with DDP.*got {kind}"):
        check_accelerator(accelerator(distributed_type=kind))


def test_other_dimensions_are_refused():
    """Tensor, context and sequence parallel ranks take the same samples."""
    plan = SimpleNamespace(tp_size=2, cp_size=1, sp_size=1)
    with pytest.raises(ValueError, match=r"data parallel dimension alone.*tp_size=2"):
        check_accelerator(accelerator(parallelism_config=plan))


def test_a_model_compiled_around_ddp_is_refused():
    """Its hooks would lie inside of the compiled code."""
    compiled = nn.Linear(2, 2)
    compiled._orig_mod = SimpleNamespace(module=None)
    with pytest.raises(ValueError, match="be left out: it compiles the model around DDP"):
        balance(accelerator(), compiled)


def test_a_stateful_loader_is_refused():
    """It would save a position that nobody moves."""
    loader = DataLoader(range(4))
    loader.use_stateful_dataloader = True
    with pytest.raises(ValueError, match="register_for_checkpointing"):
        UnwrappedLoader(loader, accelerator(split_batches=False, num_processes=1))
