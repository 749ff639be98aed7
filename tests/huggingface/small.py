"""A tiny GPT without a download, sentences of uneven lengths, and other small models."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ..torch.matrix import whole

VOCABULARY = 23
LENGTH = 8


def offline(folder: str) -> None:
    """Keep the libraries off the network, and their files in a folder."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HOME=folder,
        OMP_NUM_THREADS="1",
    )


class Sentences(Dataset):
    """Token ids with labels, of which unlike many in each row are -100."""

    def __init__(self, num_samples: int = 50, *, masked: bool = True) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        if masked:
            kept = torch.randint(3, LENGTH + 1, (num_samples, 1), generator=generator)
            self.labels[torch.arange(LENGTH) >= kept] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class FirstWhole(Sentences):
    """Of which the first have all their labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids if index < 6 else self.labels
        return {"input_ids": self.ids[index], "labels": labels[index]}


class Classified(Sentences):
    """Token ids with a class for each row."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index].sum() % 3}


class Scored(Sentences):
    """Token ids with a number for each row."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index].double().mean()}


def gpt(dtype: torch.dtype = torch.float32, *, dropout: float = 0.0) -> Any:
    """Return a GPT-2 of two layers; the same weights for everybody."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_implementation="eager" if dropout else None,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).to(dtype)


def bert(kind: str, num_labels: int) -> Any:
    """Return a BERT of one layer in double precision, for a task of its own loss."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=num_labels,
    )
    return getattr(transformers, kind)(config).double()


def gpt_in_double(dropout: float = 0.0) -> Any:
    """Return it with a loss in double precision; Hugging Face's own rounds logits to single."""
    model = gpt(torch.float64, dropout=dropout)
    model.loss_function = exact_loss
    return model


def buffered() -> Any:
    """Return a GPT with a buffer, as Llama has, which DDP hands out at the begin of a forward."""
    model = gpt_in_double()
    model.register_buffer("scale", torch.ones(1))
    return model


def unkeyed() -> Any:
    """Return a causal model that takes no loss keywords, as many that read pictures too."""
    model = gpt_in_double()
    model.accepts_loss_kwargs = False
    return model


def exact_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the cross entropy of the next tokens, over ``num_items_in_batch`` if it is given."""
    targets = labels[:, 1:].reshape(-1)
    rows = logits[:, :-1].reshape(len(targets), -1)
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(rows, targets)
    return nn.functional.cross_entropy(rows, targets, reduction="sum") / num_items_in_batch


class Plain(nn.Module):
    """A model that takes no loss keywords: its loss is a mean over the forward's samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.head = nn.Linear(8, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.tokens(input_ids))
        rows = nn.functional.cross_entropy(logits.transpose(1, 2), input_ids, reduction="none")
        return {"loss": rows.mean(), "logits": logits}


class Deaf(Plain):
    """A model that is given how many items to divide by, and does not listen."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        return super().forward(input_ids, labels)


class Pairs(Plain):
    """A model whose loss compares the rows of a batch with each other."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        rows = self.tokens(input_ids).mean(1) + self.head.weight.mean()
        return {"loss": nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))}


class TwoTexts(Plain):
    """A model of queries and documents, each of which is to find its own among all."""

    def forward(self, query: Any, document: Any, **_: Any) -> Any:
        first, second = [self.tokens(text["input_ids"]).mean(1) for text in (query, document)]
        found = first @ second.T + self.head.weight.mean()
        return {"loss": nn.functional.cross_entropy(found, torch.arange(len(found)))}


def two_texts(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return halves of the sentences, each in a mapping of its own."""
    ids = torch.stack([sample["input_ids"] for sample in samples])
    return {"query": {"input_ids": ids[:, :4]}, "document": {"input_ids": ids[:, 4:]}}


def in_a_tuple(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Return a batch that is no mapping."""
    return tuple(torch.stack([one[name] for one in samples]) for name in ("input_ids", "labels"))


def flat(model: nn.Module) -> torch.Tensor:
    """Return all parameters in one vector, in double precision."""
    return torch.cat([whole(p.detach()).double().flatten() for p in model.parameters()])


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative L2 distance."""
    return float((ours - theirs).norm() / theirs.norm())
