"""The training loader that Lightning holds: the balanced one, at the place where Lightning is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

_IS_OVER = "epoch_is_over"


@final
class FitLoader:
    """A balanced loader as Lightning's fit loop knows one.

    Lightning asks for the iterator before it tells the sampler the epoch; the order is drawn with
    the first batch. Lightning keeps the state in its own checkpoints, and loads it where an epoch
    goes on. All else is the balanced loader's.

    Args:
        loader: balanced.
        stock: the ``DataLoader`` behind it.
        num_batches: returns Lightning's steps of an epoch, which may be fewer than the loader's.
    """

    def __init__(self, loader: Any, stock: Any, num_batches: Callable[[], float]) -> None:
        self._loader = loader
        self._stock = stock
        self._num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        """Return what the balanced loader has under ``name``, such as ``dataset``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def worker_init_fn(self) -> Any:
        """What loader workers run first; Lightning sets it for ``seed_everything``."""
        return self._stock.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._stock.worker_init_fn = function

    def __len__(self) -> int:
        """Return the global steps of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, and whether that is the end of Lightning's epoch."""
        state = self._loader.state_dict()
        return {**state, _IS_OVER: bool(state["steps_taken"] >= self._num_batches())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next loop go on from ``state``; with the next epoch, if Lightning's was over.

        Raises:
            ValueError: as for the balanced loader.
        """
        if not state.get(_IS_OVER):
            self._loader.load_state_dict(dict(state))


def drop_positions(checkpoint: Mapping[str, Any]) -> None:
    """Take the positions of balanced loaders out of a checkpoint, for loaders that have none."""
    loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if any(_IS_OVER in state for state in loops.get("combined_loader", ())):
        del loops["combined_loader"]
