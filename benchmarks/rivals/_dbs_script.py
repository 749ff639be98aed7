"""DBS: its published `dbs.py`, unchanged, from a clone; with our data and our network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from _task import GLOBAL_BATCH_SIZE, LEARNING_RATE, WORLD_SIZE, Rank
from torch.utils.data import Dataset, Subset

CLONE = "Dynamic_Load_Balance_DistributedDNN"


def torchvision_of(train: Dataset[Any], test: Dataset[Any]) -> ModuleType:
    """Return what `dataloader.py` imports: it would download Fashion-MNIST."""
    torchvision, datasets, transforms = map(
        ModuleType, ("torchvision", "torchvision.datasets", "torchvision.transforms")
    )
    datasets.FashionMNIST = lambda root, train, **_: given[train]  # type: ignore[attr-defined]
    given = {True: train, False: test}
    for name in ("Compose", "ToTensor", "Normalize"):
        setattr(transforms, name, lambda *_: None)
    torchvision.datasets, torchvision.transforms = datasets, transforms  # type: ignore[attr-defined]
    return torchvision


def main() -> None:
    """Run one of its processes. What it measures, splits and reduces is its own."""
    rank = Rank()
    clone = Path(str(rank.setting.clones)) / CLONE
    sys.path.insert(0, str(clone))
    few = Subset(rank.train, range(WORLD_SIZE))  # it evaluates each epoch; that is not compared
    sys.modules["torchvision"] = torchvision_of(rank.train, few)
    sys.argv = ["dbs.py", "-d", "true", "-ds", "mnist", "-m", "mnistnet", "-dbs", "true"]
    sys.argv += ["-ws", str(WORLD_SIZE), "-b", str(GLOBAL_BATCH_SIZE)]
    sys.argv += ["-lr", str(LEARNING_RATE), "-e", str(rank.setting.num_epochs)]
    own = rank.folder / f"dbs{rank.rank}"
    (own / "statis").mkdir(parents=True)
    os.chdir(own)  # for its logs
    import dbs
    import Net.MnistNet

    device = rank.model()
    Net.MnistNet.MnistNet = lambda: device
    dbs.init_processes(rank.rank, WORLD_SIZE, dbs.run)
    rank.done(device, len(device.began))


if __name__ == "__main__":
    main()
