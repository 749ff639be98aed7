"""A small GPT that learns Python, byte by byte, with Hugging Face's `Trainer`.

Once plain and once balanced, as the file's name says. Start it with `torchrun --standalone
--nproc-per-node 2` and its name; nothing is downloaded.
"""

import argparse
import inspect

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from evenstep.huggingface import BalancedMixin


class BalancedTrainer(BalancedMixin, Trainer):
    pass


def rows(length=64):
    """The source of a module that comes with Python, cut into rows of bytes."""
    text = inspect.getsource(argparse).encode()
    ids = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in ids]


def main():
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)  # twins end alike
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir="gpt-on-bytes",
        use_cpu=not torch.accelerator.is_available(),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        num_train_epochs=2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    dataset = rows()
    trainer = BalancedTrainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=dataset,
        eval_dataset=dataset[:256],
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps, loss on the first 256 rows: {loss:.4f}")


if __name__ == "__main__":
    main()
