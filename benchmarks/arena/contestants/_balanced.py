"""evenstep itself, by any of its policies."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.arena._tasks import digits
from benchmarks.arena._world import World
from evenstep.claims import Hybrid
from evenstep.policies import AbstractPolicy
from evenstep.torch import Balancer, Runtime


@final
@dataclass(frozen=True, slots=True)
class Balanced:
    """The three lines of the README around DDP and a stock loader.

    Args:
        policy: ``"auto"``, or a paper's own rule by its name or with its settings.
        claims: work stealing inside the step, in a loop over ``loader.steps()``. None is the plain
            loop, in which there is none.
    """

    is_exact: ClassVar[bool] = True
    num_servers: ClassVar[int] = 0

    policy: str | AbstractPolicy[Any]
    claims: Hybrid | None = None

    def train(self, world: World) -> Generator[None]:
        model = DistributedDataParallel(world.model())
        optimizer = world.optimizer(model)
        train, setup = digits()[0], world.setup
        loader = DataLoader(
            TensorDataset(train.x, train.y),
            batch_size=setup.global_batch_size // setup.world_size,
            sampler=world.order,
        )
        runtime = Runtime(line_every=None, claims=self.claims or "off", machine=world.device)
        with Balancer(policy=self.policy, runtime=runtime) as balancer:
            model, loader = balancer.prepare(model, loader)
            yield
            for step in loader.steps() if self.claims else ([batch] for batch in loader):
                for x, y in step:
                    cross_entropy(model(x), y).backward()
                world.device.exchange()
                optimizer.step()
                optimizer.zero_grad()
                world.updated(model, setup.global_batch_size)
                yield
