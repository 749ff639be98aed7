"""Published training scripts that benchmarks run: where they come from, and how each starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

CHECKOUTS = {
    "examples": (
        "https://github.com/pytorch/examples",
        "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    ),
    "nanoGPT": (
        "https://github.com/karpathy/nanoGPT",
        "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    ),
    "accelerate": (
        "https://github.com/huggingface/accelerate",
        "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    ),
    "pytorch-lightning": (
        "https://github.com/Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    ),
    "pytorch-image-models": (
        "https://github.com/huggingface/pytorch-image-models",
        "aa4b5850c1543fa488abf260f18390eda46cf85d",
    ),
}
"""By folder: the URL, and the commit that is expected there."""


@dataclass(frozen=True, slots=True)
class Published:
    """A script as it is, and how it is started.

    Attributes:
        checkout: the folder of its repository.
        folder: the part of the repository that is copied for each run.
        script: its path there.
        arguments: what follows on the command line: small models, and few steps.
        cwd: the folder there in which it is started.
        stubs: what stands for data, models and packages that would have to be downloaded.
        env: more environment variables.
        device: the type of device that the script is told it has.
        ranks: how many processes.
        spawns: whether it starts its processes itself; others are started by torchrun.
    """

    checkout: str
    folder: str
    script: str
    arguments: str = ""
    cwd: str = "."
    stubs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    ranks: int = 2
    spawns: bool = False

    @property
    def name(self) -> str:
        """The path of the script, from its repository on."""
        return f"{self.checkout}/{Path(self.folder) / self.script}"


def lightning(prefix: str) -> dict[str, str]:
    """Return what tells Lightning of two processes on CPUs."""
    return {f"{prefix}_{name}": text for name, text in _ON_CPUS.items()}


_ON_CPUS = {"ACCELERATOR": "cpu", "STRATEGY": "ddp", "DEVICES": "2"}
_TUTORIAL = "distributed/ddp-tutorial-series"
GPT = (
    "gpt_config.n_layer=2 gpt_config.n_head=2 gpt_config.n_embd=32 data_config.path=data/input.txt "
    "data_config.block_size=32 data_config.truncate=0.01 trainer_config.batch_size=64 "
    "trainer_config.max_epochs=1 trainer_config.data_loader_workers=1 trainer_config.use_amp=False"
)
NANO = (
    "config/train_shakespeare_char.py --n_layer=2 --n_head=2 --n_embd=32 --block_size=32 "
    "--batch_size=4 --gradient_accumulation_steps=4 --max_iters=50 --eval_interval=25 "
    "--eval_iters=2 --compile=False --dtype=float32"
)
TIMM = (
    "--data-dir . --dataset torch/cifar10 --model test_vit --model-kwargs img_size=32 "
    "--num-classes 10 --no-aug --device cpu -j 1 -b 16 --epochs 2 --warmup-epochs 0 --lr 0.1"
)
PUBLISHED = (
    Published("examples", _TUTORIAL, "multigpu_torchrun.py", "2 1", device="cuda"),
    Published("examples", _TUTORIAL, "multigpu.py", "2 1", device="cuda", spawns=True),
    Published(
        "examples",
        "distributed/minGPT-ddp/mingpt",
        "main.py",
        GPT,
        stubs=("hydra", "omegaconf", "boto3"),
    ),
    Published("examples", "distributed/FSDP2", "example.py"),
    Published(
        "examples",
        "imagenet",
        "main.py",
        "--dummy --dist-url env:// -j 1 -b 8 --epochs 2",
        stubs=("torchvision",),
        device="cuda",
    ),
    Published("nanoGPT", ".", "train.py", NANO, stubs=("shakespeare_char",), device="cuda"),
    Published(
        "accelerate", "examples", "nlp_example.py", "--cpu", stubs=("glue", "evaluate", "bert")
    ),
    Published(
        "accelerate",
        "examples/by_feature",
        "gradient_accumulation.py",
        "--cpu --gradient_accumulation_steps 2",
        stubs=("glue", "evaluate", "bert"),
    ),
    Published(
        "pytorch-lightning",
        "examples/fabric/image_classifier",
        "train_fabric.py",
        "--epochs 3 --batch-size 16",
        stubs=("torchvision",),
        env=lightning("LT") | {"LT_CLI_USED": "1"},  # as `fabric run` sets them
    ),
    Published(
        "pytorch-lightning",
        "examples/pytorch/basics",
        "transformer.py",
        stubs=("wikitext",),
        env=lightning("PL_TRAINER")
        | {"PL_TRAINER_LIMIT_VAL_BATCHES": "2", "PL_TRAINER_LIMIT_TEST_BATCHES": "2"},
    ),
    Published("pytorch-image-models", ".", "train.py", TIMM, stubs=("torchvision",)),
)
