"""What prepared loaders are to a type checker: what they were, and what they became."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ._data.loaders._balanced import BalancedLoader
from ._data.loaders._eval import EvalLoader

T_co = TypeVar("T_co", covariant=True)

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    # There is no object of these: loaders have what they wrap by `__getattr__`. But scripts use the
    # name of their own loader again, `model, loader = balancer.prepare(model, loader)`, which only
    # a type that is both allows.
    class PreparedLoader(BalancedLoader, DataLoader[T_co]):  # type: ignore[misc, override]
        """A ``DataLoader`` whose every iteration is a global step."""

    class PreparedEval(EvalLoader, DataLoader[T_co]):  # type: ignore[misc, override]
        """A ``DataLoader`` of this rank's part of an evaluation."""

else:
    PreparedLoader, PreparedEval = BalancedLoader, EvalLoader
