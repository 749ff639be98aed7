"""What the workers of the fault tests run: one of them dies, stops, hangs or is cut off."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.exceptions import WorkerLostError
from evenstep.policies import Auto
from evenstep.torch import Balancer, Runtime

WATCHFUL = Runtime(deadline_s=1.5, heartbeat_s=0.2, line_every=None)


class Failing(nn.Module):
    """A layer that takes its time, and whose third forward may be the last."""

    def __init__(self, sent: signal.Signals | None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.sent = sent
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        sleep(0.05 if self.sent is None else 0.1)  # the victim is the slowest: others wait for it
        if self.count == 3 and self.sent is not None:
            os.kill(os.getpid(), self.sent)
        return self.layer(x)


def train(rank: int, victim: int, sent: signal.Signals) -> tuple[str, int, float]:
    """Return what ended training on this rank: the error's text, whom it names, seconds."""
    model = DistributedDataParallel(Failing(sent if rank == victim else None))
    dataset = TensorDataset(torch.randn(96, 4))
    began_s = monotonic()
    try:
        with Balancer(runtime=WATCHFUL) as balancer:
            model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
            for (x,) in loader:
                began_s = monotonic()
                model(x).mean().backward()
    except WorkerLostError as error:
        return str(error), error.rank, monotonic() - began_s
    return "nothing happened", -1, 0.0


def hang_in_the_all_reduce(rank: int, folder: str) -> None:
    """Rank 2 stops once its report is out and its part of the all-reduce is not."""
    handler = logging.FileHandler(f"{folder}/{rank}.log")
    logging.getLogger("evenstep").addHandler(handler)
    model = DistributedDataParallel(nn.Linear(4, 4))
    balancer = Balancer(runtime=WATCHFUL)
    dataset = TensorDataset(torch.randn(96, 4))
    model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
    for step, (x,) in enumerate(loader):
        if (rank, step) == (2, 2):
            with model.no_sync():
                model(x).mean().backward()
            os.kill(os.getpid(), signal.SIGSTOP)
        model(x).mean().backward()


def leave_early(rank: int, victim: int, how: str) -> str:
    """One rank ends its run with a batch that it does not use; return what the others are told."""

    def is_over(step: int) -> bool:
        if (rank, step) != (victim, 2):
            return False
        if how == "exit":
            sys.exit(0)
        return True

    return _train_until(is_over)


def raise_on_one(rank: int, victim: int, at: int) -> str:
    """One rank's data set has a bad sample; return what each is told."""

    def is_over(step: int) -> bool:
        if rank == victim and step == at:
            raise ValueError("sample 17 has no label\nand more that is left out")
        return False

    return _train_until(is_over)


def _train_until(is_over: Callable[[int], bool]) -> str:
    model = DistributedDataParallel(nn.Linear(4, 4))
    dataset = TensorDataset(torch.randn(1200, 4))
    try:
        with Balancer(runtime=WATCHFUL) as balancer:
            model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
            for step, (x,) in enumerate(loader):
                if is_over(step):
                    return "left"
                model(x).mean().backward()
    except (WorkerLostError, ValueError) as error:
        return str(error)
    except SystemExit:
        return "left"
    return "nothing happened"


class FailedDevice:
    """Stands for a look at a loss on a device that has failed."""

    def values(self) -> list[float]:
        raise RuntimeError("CUDA error: device-side assert triggered")


def fail_on_a_device(rank: int) -> tuple[str, list[str]]:
    """Rank 0's device fails; return what each is told, and the names of its events."""
    events: list[Any] = []
    runtime = replace(WATCHFUL, hooks=(events.append,))
    model = DistributedDataParallel(nn.Linear(4, 4))
    dataset = TensorDataset(torch.randn(48, 4))
    told = "nothing happened"
    try:
        with Balancer(runtime=runtime) as balancer:
            model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
            for step, (x,) in enumerate(loader):
                model(x).mean().backward()
                if rank == 0 and step == 2:
                    balancer._parts.steps._outputs.unread.append((0, None, FailedDevice()))
                    FailedDevice().values()
    except RuntimeError as error:
        told = str(error)
    return told, [type(event).__name__ for event in events]


def hang(rank: int) -> str:
    """Rank 2 comes to a halt in its fifth step, short of its heartbeats; return the error."""
    model = DistributedDataParallel(Halting(rank == 2))
    dataset = TensorDataset(torch.randn(96, 4))
    runtime = Runtime(deadline_s=1.5, heartbeat_s=0.1, hang_s=3.0, line_every=None)
    try:
        with Balancer(policy="equal", runtime=runtime) as balancer:
            model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
            for (x,) in loader:
                model(x).mean().backward()
    except WorkerLostError as error:
        return str(error)
    return "nothing happened"


class Halting(nn.Module):
    """A layer that takes its time; the fifth forward may never end."""

    def __init__(self, halts: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.halts = halts
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        sleep(0.1 if self.halts else 0.02)
        if self.halts and self.count == 5:
            threading.Event().wait()
        return self.layer(x)


def pause_together(rank: int) -> str:
    """All ranks evaluate for longer than a rank may hang; return what happened."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    dataset = TensorDataset(torch.randn(24, 4))
    runtime = Runtime(deadline_s=10, heartbeat_s=0.1, hang_s=0.5, line_every=None)
    with Balancer(runtime=runtime) as balancer:
        model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
        for step, (x,) in enumerate(loader):
            if step == 2:
                sleep(1.5)
            model(x).mean().backward()
    return "nothing happened"


class Timed(nn.Module):
    """A layer that takes so many seconds per sample, by the number of its forward."""

    def __init__(self, seconds: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seconds = seconds
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(len(x) * self.seconds(self.count))
        self.count += 1
        return self.layer(x)


def stop_and_resume(rank: int, num_steps: int) -> list[tuple[int, ...]]:
    """Rank 2 is stopped for a second in its tenth step and resumed; return all sizes."""

    def seconds(count: int) -> float:
        if (rank, count) == (2, 10):
            pause = f"sleep 1; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", pause], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return 0.002

    return sizes_of(seconds, num_steps, Runtime(deadline_s=6, heartbeat_s=0.2, line_every=None))


def slow_for_a_while(rank: int, num_steps: int) -> list[tuple[int, ...]]:
    """Rank 2 is a hundred times slower from the tenth to the thirtieth step."""

    def seconds(count: int) -> float:
        return 0.1 if rank == 2 and 10 <= count < 30 else 0.001

    return sizes_of(seconds, num_steps, Runtime(line_every=None))


def sizes_of(seconds: Any, num_steps: int, runtime: Runtime) -> list[tuple[int, ...]]:
    """Train with 24 samples a step; return the sizes of every step."""
    model = DistributedDataParallel(Timed(seconds))
    dataset = TensorDataset(torch.randn(24 * num_steps, 4))
    sizes = []
    with Balancer(policy=Auto(), runtime=runtime) as balancer:
        model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=8))
        for (x,) in loader:
            sizes.append(balancer.batch_sizes)
            model(x).mean().backward()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return sizes


def cut_off(rank: int) -> str:
    """The connection between ranks 0 and 1 breaks, as by a firewall that forgets it.

    Return the error that ends this rank.
    """
    model = DistributedDataParallel(nn.Linear(4, 4))
    dataset = TensorDataset(torch.randn(24 * 40, 4))
    try:
        with Balancer(runtime=Runtime(line_every=None)) as balancer:
            model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=8))
            for step, (x,) in enumerate(loader):
                if (rank, step) == (1, 3):
                    cut(balancer._session.exchange._channel)
                model(x).mean().backward()
    except WorkerLostError as error:
        return str(error)
    return "nothing happened"


def cut(channel: Any) -> None:
    """Break this rank's side connections, and no other."""
    for peer in channel._peers.values():
        peer.connection.shutdown(socket.SHUT_RDWR)


def listen() -> list[str]:
    """Return the list to which everything is added that evenstep logs."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("evenstep").addHandler(handler)
    return texts


def with_settings(rank: int, settings: dict[str, Any]) -> tuple[int, list[str]]:
    """Train 30 steps; return their number and what was logged."""
    texts = listen()
    model = DistributedDataParallel(nn.Linear(4, 4))
    dataset = TensorDataset(torch.randn(16 * 30, 4))
    num_steps = 0
    with Balancer(**settings) as balancer:
        model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=8))
        for (x,) in loader:
            model(x).mean().backward()
            num_steps += 1
    return num_steps, texts


def vanishing_folder(rank: int, folder: str) -> tuple[int, list[str]]:
    """The folder of the events is deleted in the middle of a run."""
    texts = listen()
    model = DistributedDataParallel(nn.Linear(4, 4))
    dataset = TensorDataset(torch.randn(16 * 30, 4))
    num_steps = 0
    with Balancer(runtime=Runtime(line_every=None, run_dir=folder)) as balancer:
        model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=8))
        for (x,) in loader:
            if (rank, num_steps) == (0, 10):
                subprocess.run(["rm", "-r", folder], check=True)
            model(x).mean().backward()
            num_steps += 1
    return num_steps, texts


def block(event: Any) -> None:
    """Be a sink that never comes back."""
    threading.Event().wait()


def refuse(event: Any) -> None:
    """Be a sink that fails."""
    raise KeyError("a mistake of the user's")


def lose_one_in_an_evaluation(rank: int, sent: signal.Signals) -> str:
    """Rank 1 dies or stops before the mean; return the error of the other."""
    dataset = TensorDataset(torch.randn(16, 4))
    balancer = Balancer(runtime=WATCHFUL)
    model, loader = balancer.prepare(nn.Linear(4, 1), DataLoader(dataset, batch_size=4))
    evaluation = balancer.prepare_eval(DataLoader(dataset, batch_size=4))
    for (x,) in loader:
        model(x).mean().backward()
    for (x,) in evaluation:
        evaluation.add("norm", x.norm())
    if rank == 1:
        os.kill(os.getpid(), sent)
    try:
        evaluation.mean()
    except WorkerLostError as error:
        return str(error)
    return "nothing happened"
