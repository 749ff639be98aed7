"""What stands for data, models and packages that a published script would have to download."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from functools import wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

NUM_SAMPLES = 640


def module(name: str, **names: Any) -> ModuleType:
    """Return a module that holds some names, loaded as ``name``."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    made.__dict__.update(names)
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, made)
    return made


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Random pictures with a number each."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, *shape, generator=generator)
        self.classes = torch.randint(num_classes, (num_samples,), generator=generator).tolist()

    def __len__(self) -> int:  # as data sets have it
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:  # likewise
        return self.inputs[index], self.classes[index]


class Transform:
    """Changes nothing, and is never called: pictures come as they are to be."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


InterpolationMode = Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS")


def torchvision() -> None:
    """A small network with norms for ``resnet18``, and random pictures."""

    def fake_data(size: int, shape: Any, num_classes: int, transform: Any) -> Pictures:
        return Pictures((3, 16, 16), num_classes, NUM_SAMPLES // (1 if size > 100_000 else 10))

    def mnist(root: str, *, train: bool, **_: Any) -> Pictures:
        return Pictures((1, 28, 28), 10, NUM_SAMPLES // (1 if train else 10))

    def cifar10(root: str, *, train: bool, **_: Any) -> Pictures:
        made = Pictures((3, 32, 32), 10, NUM_SAMPLES // (1 if train else 10))
        made.inputs = (128 + 40 * made.inputs).clamp(0, 255).to(torch.uint8)
        return made

    def resnet18() -> nn.Module:
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 1000))

    def anything(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Transform

    module("torchvision")
    module("torchvision.datasets", FakeData=fake_data, MNIST=mnist, CIFAR10=cifar10)
    module("torchvision.models", resnet18=resnet18)
    names = ("Compose", "ToTensor", "Normalize")
    module("torchvision.transforms", **dict.fromkeys(names, Transform))
    module("torchvision.transforms.functional", InterpolationMode=InterpolationMode)
    module("torchvision.ops")
    module("torchvision.ops.misc", FrozenBatchNorm2d=nn.BatchNorm2d)
    module("torchvision.utils")
    for name in ("", ".datasets", ".models", ".transforms"):
        # Libraries that find torchvision import more of it, and call none of that here.
        sys.modules[f"torchvision{name}"].__dict__["__getattr__"] = anything


def hydra() -> None:
    """Its decorator: a file of settings, with those of the command line over them."""

    def main(*, config_path: str, config_name: str, **_: Any) -> Callable[..., Any]:
        def decorated(function: Callable[[Any], Any]) -> Callable[[], Any]:
            folder = Path(inspect.getfile(function)).parent / config_path

            @wraps(function)
            def called() -> Any:
                import yaml

                settings = yaml.safe_load((folder / f"{config_name}.yaml").read_text("utf-8"))
                for argument in sys.argv[1:]:
                    name, _, text = argument.partition("=")
                    *parts, last = name.split(".")
                    inner = settings
                    for part in parts:
                        inner = inner[part]
                    inner[last] = yaml.safe_load(text)
                return function(settings)

            return called

        return decorated

    module("hydra", main=main)


def omegaconf() -> None:
    """A dict is settings enough."""
    module("omegaconf", DictConfig=dict)


def boto3() -> None:
    """Nothing is sent anywhere."""
    module("boto3")


class Sentences(dict[str, list[dict[str, Any]]]):
    """Random sentences with random labels, of some lengths; they are tokens already."""

    def __init__(self, *_: Any) -> None:
        generator = np.random.default_rng(0)
        for split, number in (("train", 2 * NUM_SAMPLES), ("validation", NUM_SAMPLES // 10)):
            self[split] = [
                {
                    "input_ids": generator.integers(100, size=12 + index % 3).tolist(),
                    "labels": int(generator.integers(2)),
                }
                for index in range(number)
            ]

    def map(self, *_: Any, **__: Any) -> Sentences:
        """Return the same; so do other methods that prepare it."""
        return self

    rename_column = map


def glue() -> None:
    """The data sets of one benchmark."""
    module("datasets", load_dataset=Sentences)


class Metric:
    """Counts nothing."""

    def add_batch(self, **_: Any) -> None:
        """Take predictions."""

    def compute(self) -> dict[str, float]:
        """Return no score."""
        return {}


def evaluate() -> None:
    """A package of metrics."""
    module("evaluate", load=lambda *_: Metric())


class Tokenizer:
    """Only pads."""

    def pad(self, examples: Iterable[dict[str, Any]], **_: Any) -> Any:
        """Return a batch of what is tokens already."""
        from transformers import BatchEncoding

        rows = list(examples)
        tokens = [row["input_ids"] for row in rows]
        longest = max(map(len, tokens))
        return BatchEncoding(
            {
                "input_ids": torch.tensor([one + [0] * (longest - len(one)) for one in tokens]),
                "attention_mask": torch.tensor(
                    [[1] * len(one) + [0] * (longest - len(one)) for one in tokens]
                ),
                "labels": torch.tensor([row["labels"] for row in rows]),
            }
        )


def bert() -> None:
    """The library is the real one; its model is small and untrained."""
    import transformers

    def made(*_: Any, **__: Any) -> Any:
        return transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=100,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    classes: Any = transformers
    classes.AutoTokenizer.from_pretrained = lambda *_, **__: Tokenizer()
    classes.AutoModelForSequenceClassification.from_pretrained = made


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random words."""

    vocab_size = 64

    def __init__(self, *_: Any, **__: Any) -> None:
        # The script puts 4,000 aside for evaluations.
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(self.vocab_size, (4240 + 8,), generator=generator)

    def __len__(self) -> int:  # as data sets have it
        return len(self.words) - 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:  # likewise
        return self.words[index : index + 8], self.words[index + 1 : index + 9]


def wikitext() -> None:
    """The library is the real one; the words of its demo are random."""
    import lightning.pytorch.demos as demos

    demos.WikiText2 = Text  # type: ignore[misc, assignment]


def shakespeare_char() -> None:
    """The files that a script of nanoGPT's writes, with random letters; in the current folder."""
    folder = Path("data/shakespeare_char")
    if not (folder / "meta.pkl").exists():
        letters = np.random.default_rng(0).integers(64, size=20_000, dtype=np.uint16)
        letters.tofile(folder / "train.bin")
        letters[:2000].tofile(folder / "val.bin")
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


STUBS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        torchvision,
        hydra,
        omegaconf,
        boto3,
        glue,
        evaluate,
        bert,
        wikitext,
        shakespeare_char,
    )
}


def put(names: Iterable[str]) -> None:
    """Put some in their places."""
    for name in names:
        STUBS[name]()
