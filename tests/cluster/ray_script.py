"""What Ray Train's workers run: its published example with lines more, and elastic training."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from evenstep.torch import Balancer, Checkpoint, Runtime

from .elastic_script import GLOBAL_BATCH_SIZE, Diary, History, make_data, make_model

NUM_PICTURES, NUM_HELD_OUT = 42 * 10, 30
QUIET = Runtime(line_every=None)


def pictures(number: int) -> TensorDataset:
    """Return random pictures of one channel, with classes, in fp64."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(number, 1, 28, 28, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(10, (number,), generator=generator))


def published(config: dict[str, Any]) -> None:
    """Run the published example's training function, and keep what is to be compared.

    Stand-ins: random pictures for torchvision's data, fp64, no dropout, since ranks draw numbers of
    their own there, and a forward that takes its time by sleeping.

    Args:
        config: the ``source`` of the example, the ``folder`` for what is kept, ``slopes_s`` of a
            sample by rank, and what the example's function takes.
    """
    folder, rank = Path(config["folder"]), dist.get_rank()
    os.environ["HOME"] = str(folder)  # where the example has a lock
    _stand_in()
    torch.set_default_dtype(torch.float64)
    nn.Dropout = lambda share: nn.Identity()  # type: ignore[assignment, misc]
    kept: dict[str, Any] = {"sizes": []}
    slope_s, prepare_model = config["slopes_s"][rank], ray.train.torch.prepare_model

    def keep(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if module.training:
            kept["sizes"].append(len(inputs[0]))
            time.sleep(slope_s * len(inputs[0]))

    def prepared(model: nn.Module) -> Any:
        kept["begun"] = {name: value.clone() for name, value in model.state_dict().items()}
        kept["model"] = model
        model.register_forward_pre_hook(keep)
        return prepare_model(model)

    ray.train.torch.prepare_model = prepared
    example = ModuleType("example")
    exec(compile(config["source"], "torch_fashion_mnist_example.py", "exec"), example.__dict__)
    example.train_func_per_worker(config)
    kept["ended"] = kept.pop("model").state_dict()
    torch.save(kept, folder / f"rank-{rank}.pt")


def _stand_in() -> None:
    """Have the example import stand-ins for torchvision, whose pictures would be downloaded."""
    vision, datasets, transforms = (
        ModuleType(name) for name in ("torchvision", "torchvision.datasets", "torchvision.trans")
    )

    def fashion(root: str, train: bool, **options: Any) -> TensorDataset:
        return pictures(NUM_PICTURES if train else NUM_HELD_OUT)

    vars(datasets)["FashionMNIST"] = fashion
    for name in ("Compose", "Normalize", "ToTensor"):
        vars(transforms)[name] = lambda *arguments: None
    vars(vision).update(datasets=datasets, transforms=transforms)
    sys.modules |= {
        "torchvision": vision,
        "torchvision.datasets": datasets,
        "torchvision.transforms": transforms,
    }


def elastic(config: dict[str, Any]) -> None:
    """Train to the end from the last checkpoint, through a kill and changes of the world size.

    Args:
        config: the ``folder`` of all traces, the ``steps`` of training, the step at which rank 1
            kills itself once (``kill_at``), and ``worlds``: by step, how many workers it takes to
            go on from there.
    """
    folder, steps, world_size = Path(config["folder"]), config["steps"], dist.get_world_size()
    model, history, diary = make_model(), History(), Diary(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stock = DataLoader(
        make_data(),
        batch_size=-(-GLOBAL_BATCH_SIZE // world_size),
        shuffle=True,
        generator=torch.Generator().manual_seed(2),
    )
    with Balancer(GLOBAL_BATCH_SIZE, runtime=QUIET) as balancer:
        wrapped, loader = balancer.prepare(ray.train.torch.prepare_model(model), stock)
        checkpoint = Checkpoint(
            folder / "checkpoints",
            model=wrapped,
            optimizer=optimizer,
            loader=loader,
            balancer=balancer,
            others={"history": history},
        )
        step = checkpoint.load() or 0
        diary.started(step)
        while step < steps:
            for x, y, index in loader:
                time.sleep(0.002 * len(x) / 2 ** dist.get_rank())
                nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                history.note(step, index[: balancer.num_samples])
                step += 1
                diary.write(step=step)
                if step % 5 == 0 or step == steps:
                    history.gather()
                    checkpoint.save(step)
                    ray.train.report({"step": step})
                _meet_fate(step, config, diary)
                if step == steps:
                    break
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), **history.state_dict()}, folder / "end.pt")


def _meet_fate(step: int, config: dict[str, Any], diary: Diary) -> None:
    """Die, if this is the rank and the step; wait for the change of workers, if it is time."""
    mark = Path(config["folder"]) / "killed"
    if step == config["kill_at"] and dist.get_rank() == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wanted = config["worlds"].get(step, dist.get_world_size())
    if wanted != dist.get_world_size():
        diary.write(step=step, wanted=wanted)
        time.sleep(300)  # Ray ends this worker before


class Rows(IterableDataset[dict[str, Any]]):
    """The rows of a data set of Ray Data's.

    Args:
        shard: as ``ray.train.get_dataset_shard`` returns it.
    """

    def __init__(self, shard: Any) -> None:
        self.shard = shard

    def __iter__(self) -> Any:
        return iter(self.shard.iter_rows())


def rows(config: dict[str, Any]) -> None:
    """Train two epochs on rows that all workers read, resumed in the second; keep which.

    Args:
        config: the ``folder`` for what each rank trained on, and for what a shard is told that is
            given to ``prepare`` itself.
    """
    folder, rank = Path(config["folder"]), dist.get_rank()
    shard = ray.train.get_dataset_shard("train")
    trained: list[list[int]] = []
    state, refused = None, ""
    for most in (8, 100):
        model = ray.train.torch.prepare_model(nn.Linear(1, 1))
        with Balancer(12, runtime=QUIET) as balancer:
            loader = DataLoader(Rows(shard), batch_size=-(-12 // dist.get_world_size()))
            try:
                balancer.prepare(shard)
            except ValueError as error:
                refused = str(error)
            model, loader = balancer.prepare(model, loader, stream="same")
            if state is not None:
                loader.load_state_dict(state)
            epochs = 2 if state is None else 1
            for _ in range(epochs):
                for batch in loader:
                    time.sleep(0.005 * len(batch["id"]) / 2**rank)
                    model(batch["id"][:, None].float()).square().mean().backward()
                    trained.append(batch["id"][: balancer.num_samples].tolist())
                    if len(trained) == most:
                        break
            state = loader.state_dict()
    (folder / f"rows-{rank}.json").write_text(json.dumps({"trained": trained, "refused": refused}))
