"""Sentences of unlike lengths, as tokenizers leave them, and what pads or packs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from .small import LENGTH, VOCABULARY

Row = Mapping[str, Any]


def rows(num_samples: int = 50, *, masked: bool = True, classes: bool = False) -> list[Row]:
    """Return lists of token ids, of 2 to 8, with the labels of a causal model or a class each."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(num_samples):
        size, hidden = (int(torch.randint(*ends, (), generator=generator)) for ends in ENDS)
        ids = torch.randint(1, VOCABULARY, (size,), generator=generator).tolist()
        labels = [-100] * (min(hidden, size - 2) if masked else 0)
        labels += ids[len(labels) :]
        found.append({"input_ids": ids, "labels": sum(ids) % 3 if classes else labels})
    return found


ENDS = (3, LENGTH + 1), (0, 4)


class Texts(Dataset[Row]):
    """Rows that are dicts, as of a list."""

    def __init__(
        self, num_samples: int = 50, *, masked: bool = True, classes: bool = False
    ) -> None:
        self._rows = rows(num_samples, masked=masked, classes=classes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


class Table(Texts):
    """The same with columns, as a data set of Hugging Face has them."""

    @property
    def column_names(self) -> list[str]:
        return ["input_ids", "labels"]

    def __getitem__(self, index: Any) -> Any:
        return [row[index] for row in self._rows] if isinstance(index, str) else self._rows[index]


class Steep(Table):
    """The same, of which three in four are short: equal loads are unlike numbers."""

    def __init__(self, num_samples: int = 50, *, masked: bool = True) -> None:
        super().__init__(num_samples, masked=masked)
        self._rows = [
            {name: values[-2:] if number % 4 else values for name, values in row.items()}
            for number, row in enumerate(self._rows)
        ]


def padding(kind: str) -> Any:
    """Return a collator of transformers that pads, with a tokenizer that needs no download."""
    import transformers
    from tokenizers import Tokenizer, models

    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="1")), pad_token="0"
    )
    return getattr(transformers, kind)(tokenizer)


def packing() -> Any:
    """Return a collator of transformers that makes one row of all samples, and its ends."""
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
