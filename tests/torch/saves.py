"""Saves a step again and again, and dies in the middle of it.

For a process of its own without a process group, which can be forked.
"""

from __future__ import annotations

import os
import shutil
import sys
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from .checkpoints import Training


def killed_while_saving_again(folder: str) -> list[tuple[int, int | None, float]]:
    """Save a step, then save it again in processes that die at the first, the second, ... call.

    Returns:
        For each: the call, the step that ``load`` then finds, and which parameters: 1.0 are those
        of the first save, 2.0 those of the second. The last one did not die.
    """
    root, pristine, found = Path(folder) / "run", Path(folder) / "pristine", []
    _filled(root, 1.0).checkpoint.save(7)
    shutil.copytree(root, pristine)
    for call in count(1):
        shutil.rmtree(root)
        shutil.copytree(pristine, root)
        child = os.fork()
        if child == 0:
            training = _filled(root, 2.0)
            _die_at(call)
            training.checkpoint.save(7)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        training = _filled(root, 0.0)
        step = training.checkpoint.load()
        found.append((call, step, float(training.model.idle.weight.detach().mean())))
        if status == 0:
            return found
    raise AssertionError("it counts for ever")


def _filled(root: Path, value: float) -> Training:
    training = Training(root)
    nn.init.constant_(training.model.idle.weight, value)
    return training


def _die_at(call: int) -> None:
    """End this process before its call number ``call`` that changes what is on the disk."""
    numbers = count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
        writes = event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]
        if (changes or writes) and next(numbers) == call:
            os._exit(9)

    sys.addaudithook(hook)
