"""Which optimizers may be cut into ranges: those that look at each element by itself."""

from __future__ import annotations

import torch
from torch import nn, optim

from ....exceptions import invalid

_ELEMENT_WISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.ASGD,
    optim.Rprop,
)
_WHY_NOT = {
    "LBFGS": "it searches along a direction of all parameters at once",
    "Adafactor": "it averages over rows and columns of matrices",
    "Muon": "it makes matrices orthogonal",
    "SparseAdam": "its gradients are sparse",
}
_NAME = "ShardedOptimizer(optimizer)"


def check_optimizer(optimizer: torch.optim.Optimizer, *, element_wise: bool) -> None:
    """Refuse what would compute something else on a range than on the whole.

    Args:
        optimizer: as it was given.
        element_wise: whether its user vouches for a class that is not one of torch's.

    Raises:
        ValueError: it is not element-wise, or not known to be; it is differentiable, or a scheduler
            holds it already.
    """
    kind = type(optimizer)
    if kind.__name__ in _WHY_NOT and kind.__module__.startswith("torch."):
        rule = "compute every element from its own gradient and state alone"
        got = f"{kind.__name__}: {_WHY_NOT[kind.__name__]}"
        raise invalid(_NAME, rule, got, "Use it without `ShardedOptimizer`, on every rank.")
    if kind not in _ELEMENT_WISE and not element_wise:
        rule = "be an element-wise optimizer of torch's"
        remedy = "Give `element_wise=True` if yours looks at each element by itself."
        raise invalid(_NAME, rule, kind.__name__, remedy)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise invalid(
            _NAME, "be not differentiable", "differentiable=True", "Steps here leave no graph."
        )
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        rule = "have no scheduler yet"
        raise invalid(_NAME, rule, "one that has", "Make schedulers of the `ShardedOptimizer`.")


def check_parameters(parameters: list[torch.Tensor]) -> None:
    """Refuse parameters that have no memory of their own to be cut.

    Raises:
        ValueError: one is no plain dense tensor.
    """
    for index, parameter in enumerate(parameters):
        if type(parameter) not in (torch.Tensor, nn.Parameter):
            rule, got = "hold plain parameters", f"a {type(parameter).__name__} at {index}"
            raise invalid(_NAME, rule, got, "FSDP and its like shard optimizers themselves.")
        if parameter.layout != torch.strided or not is_dense(parameter):
            rule = "hold parameters that fill a piece of memory"
            got = f"one of shape {tuple(parameter.shape)} that does not, at {index}"
            raise invalid(_NAME, rule, got, "Give `parameter.contiguous()` to the model.")


def check_gradients(parameters: list[torch.Tensor]) -> None:
    """Refuse gradients of which no range can be taken.

    Raises:
        TypeError: one is sparse.
    """
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise TypeError(
                f"`ShardedOptimizer.step` cannot take the sparse gradient of parameter {index}. "
                f"Make the embedding with `sparse=False`."
            )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one piece of memory, in whatever order."""
    expected = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in pairs if size != 1):
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return True
