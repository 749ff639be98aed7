"""Trainer and Accelerate on three workers: a tiny GPT, slowed down, or as it is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from torch.utils.data import DataLoader

from evenstep.huggingface import BalancedMixin, balance
from evenstep.torch import Runtime

BATCH_SIZE = 14  # three workers make 42: speeds 1 : 2 : 4 divide it
LENGTH = 16
VOCABULARY = 32
QUIET = Runtime(line_every=None)


def offline() -> None:
    """Keep the libraries off the network."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )


def gpt() -> Any:
    """Return a GPT-2 of two layers, made from its sizes: nothing is downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2}
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes, **no_dropout)
    )


def slowed(model: Any, slope_s: float) -> Any:
    """Return the model, of which a forward and its backward take at least ``slope_s`` a row.

    It sleeps before the first block's backward ends, as a slower device would be late with both:
    what comes after that, the embedding's gradient, is all that is not slowed.
    """
    ends_s: list[float] = []

    def begin(module: Any, inputs: Any, keywords: Any) -> None:
        ends_s[:] = [perf_counter() + slope_s * len(keywords["input_ids"])]

    def end(module: Any, to_inputs: Any, to_outputs: Any) -> None:
        sleep(max(0.0, ends_s[0] - perf_counter()))

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.transformer.h[0].register_full_backward_hook(end)
    return model


def rows(num_steps: int, batch_size: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of tokens for so many global steps of three workers, some labels masked."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (num_steps * batch_size * 3, LENGTH), generator=generator)
    kept = torch.randint(4, LENGTH + 1, (len(ids), 1), generator=generator)
    labels = torch.where(torch.arange(LENGTH) < kept, ids, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def trainer(
    model: Any,
    data: list[dict[str, torch.Tensor]],
    folder: str,
    *,
    batch_size: int,
    num_accumulated: int,
    balancing: dict[str, Any] | None,
) -> Any:
    """Return a trainer of one epoch; a plain one without ``balancing``."""
    from transformers import Trainer, TrainingArguments

    class BalancedTrainer(BalancedMixin, Trainer):
        pass

    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=num_accumulated,
        num_train_epochs=1,
        learning_rate=1e-3,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        data_seed=3,
    )
    if balancing is None:
        return Trainer(model=model, args=arguments, train_dataset=data)
    return BalancedTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        balancing={"runtime": QUIET, **balancing},
    )


def trainer_seconds(
    rank: int, slopes_s: list[float], num_steps: int, num_accumulated: int
) -> tuple[list[float], tuple[int, ...]]:
    """Return seconds of every optimizer step of a balanced Trainer, and the last sizes."""
    from transformers import TrainerCallback

    offline()
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            marks.append(perf_counter())

    batch_size = BATCH_SIZE // num_accumulated
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(
            slowed(gpt(), slopes_s[rank]),
            rows(num_steps, BATCH_SIZE),
            folder,
            batch_size=batch_size,
            num_accumulated=num_accumulated,
            balancing={},
        )
        made.add_callback(Clock())
        made.train()
    seconds = [after - before for before, after in pairwise(marks)]
    return seconds, made.balancer.batch_sizes


def accelerate_loop(
    model: Any, data: Any, batch_size: int, options: dict[str, Any] | None
) -> tuple[list[float], tuple[int, ...]]:
    """Train for an epoch; return seconds of every step, and the last sizes if balanced."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(data, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if options is not None:
        model, loader = balance(accelerator, model, loader, runtime=QUIET, **options)
    seconds, began_s = [], perf_counter()
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        now_s = perf_counter()
        seconds.append(now_s - began_s)
        began_s = now_s
    if options is None:
        return seconds, ()
    sizes = loader.balancer.batch_sizes
    loader.close()
    return seconds, sizes


def accelerate_seconds(
    rank: int, slopes_s: list[float], num_steps: int
) -> tuple[list[float], tuple[int, ...]]:
    """Return seconds of every step of Accelerate's loop, balanced, and the last sizes."""
    offline()
    data = rows(num_steps, BATCH_SIZE)
    return accelerate_loop(slowed(gpt(), slopes_s[rank]), data, BATCH_SIZE, {})


def _trained_by_trainer(batch_size: int, balancing: dict[str, Any] | None, steps: int) -> Any:
    model = gpt()
    with tempfile.TemporaryDirectory() as folder:
        trainer(
            model,
            rows(steps, BATCH_SIZE),
            folder,
            batch_size=batch_size // 2,
            num_accumulated=2,
            balancing=balancing,
        ).train()
    return model


def _trained_by_accelerate(batch_size: int, options: dict[str, Any] | None, steps: int) -> Any:
    model = gpt()
    # Masked labels alike in number: the loss is a mean over targets, the weights count rows.
    data = [{**row, "labels": row["input_ids"]} for row in rows(steps, BATCH_SIZE)]
    accelerate_loop(model, data, batch_size, options)
    return model


TRAINERS: dict[str, Callable[[int, dict[str, Any] | None, int], Any]] = {
    "Trainer": _trained_by_trainer,
    "Accelerate": _trained_by_accelerate,
}


def parameters(
    rank: int, name: str, options: dict[str, Any] | None, num_steps: int, batch_size: int
) -> torch.Tensor:
    """Return all parameters after a training, in one vector; plain where options are None."""
    offline()
    model = TRAINERS[name](batch_size, options, num_steps)
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def middle(seconds: list[float]) -> float:
    """Return the median of the steps after the first five, which find the sizes."""
    return median(seconds[5:])
