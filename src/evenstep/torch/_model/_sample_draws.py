"""Dropout by sample: what the forwards of a model draw follows from its samples' places.

Torch's functions are overridden while a forward of a handed-out batch runs, on its thread. Dropout
and its kin draw from the samples' keys; what draws in any other way is refused by name, as it would
depend on who computes which sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..._nested_tensors import tensors_in
from ..._types import IntArray
from ...exceptions import invalid
from .._data.fetch._sources import FACTORS, drawn_rows, mixed
from .._step._reductions import ForwardRecord
from .._step._tickets import Match, copied
from ._compiled import UncompiledHook
from ._weighting import ForwardHook

_MOST_AT_ONCE = 1 << 16  # elements that are drawn at a time: they stay in a CPU's cache
_MOST_ON_DEVICE = 1 << 24  # there, 128 MiB
_BLOCK = 32  # draws for which rows are made ready and go to the device together


@final
class RowMasks:
    r"""Draws masks by a counter: an element's bit is a hash of its row and its place in that row.

    The hash is SplitMix64's: of ``row + place``, where the row's number follows from its sample's
    key and the number of the draw, and the place is the sum of its coordinates, each times an odd
    constant of its dimension. So a row that is padded keeps the bits that it has unpadded.

    Args:
        keys: of the samples, one a row.
        first: number of the first draw.
    """

    def __init__(self, keys: IntArray, first: int) -> None:
        self._keys = keys
        self._next = first
        self._rows: list[torch.Tensor] = []  # of the next draws
        self._device: torch.device | None = None

    def draw(self, shape: torch.Size, chance: float, device: torch.device) -> torch.Tensor:
        """Return booleans of ``shape``, True with this chance, whose rows are the samples'.

        Args:
            shape: its first dimension is as long as there are samples.
            chance: from 0 to 1.
            device: where they are made. It is not waited for.
        """
        rows = self._next_rows(device).view(-1, *[1] * (len(shape) - 1))
        threshold = round(chance * 2.0**64) - (1 << 63)
        if threshold >= 1 << 63:
            return torch.ones(shape, dtype=torch.bool, device=device)
        places = _places(shape[1:], device)
        most = _MOST_AT_ONCE if device.type == "cpu" else _MOST_ON_DEVICE
        num_rows = max(most // max(places.numel(), 1), 1)
        blocks = rows.split(num_rows)  # type: ignore[no-untyped-call]
        parts = [_hashed(block + places) < threshold for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _next_rows(self, device: torch.device) -> torch.Tensor:
        if not self._rows or device != self._device:
            rows = torch.from_numpy(drawn_rows(self._keys, self._next, _BLOCK))
            if device.type != "cpu":  # from pinned memory, or the device is waited for
                rows = rows.pin_memory().to(device, non_blocking=True)
            self._rows, self._device = list(rows.unbind(0)), device
        self._next += 1
        return self._rows.pop(0)


def _places(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Return the numbers of the places in a row, ``(1, *shape)``."""
    places = torch.zeros((1,) * (1 + len(shape)), dtype=torch.int64, device=device)
    factors = (mixed(np.arange(len(shape), dtype=np.uint64)) | np.uint64(1)).view(np.int64)
    for at, size in enumerate(shape):
        along = torch.arange(size, device=device) * int(factors[at])
        places = places + along.view(-1, *[1] * (len(shape) - 1 - at))
    return places


def _hashed(numbers: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64 of ``numbers``, which are overwritten, less its last shift."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        shifted = (numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # without the sign
        numbers.bitwise_xor_(shifted).mul_(factor - (1 << 64))  # the factor as a signed integer
    return numbers


_SETTING = "Runtime(sample_seed=...)"
_LEAVE_OUT = "or leave `sample_seed` out."


def check_draws(module: nn.Module, *, compiles: bool) -> None:
    """Raise if ``module`` hides what it draws.

    Raises:
        ValueError: it is compiled, or has a part that is.
    """
    scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    if compiles or scripted:
        raise invalid(
            _SETTING,
            "be used with models that are not compiled, whose dropout cannot be seen",
            f"{type(module).__name__}, compiled by `torch.{'jit' if scripted else 'compile'}`",
            f"Leave it uncompiled, {_LEAVE_OUT}",
        )


@final
class SampleDraws:
    """Has the forwards of a model draw by sample.

    Args:
        module: the user's outermost module.
        hook: on that module; it knows to which batch a forward belongs.
    """

    def __init__(self, module: nn.Module, hook: ForwardHook) -> None:
        self._hook = hook
        self._mode: _DrawMode | None = None
        enter, leave = UncompiledHook((self._enter,), _call), UncompiledHook((self._leave,), _call)
        self._handles = (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True, always_call=True),
        )

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        if self._hook.use is not None and module.training:
            self._mode = _DrawMode(self._hook.use, tensors_in((inputs, keywords)))
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, *_: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _call(hooks: Sequence[Callable[..., Any]], *args: Any) -> None:
    for hook in hooks:
        hook(*args)


class _DrawMode(TorchFunctionMode):
    """Draws by the samples of one forward.

    Args:
        use: the forward.
        tensors: its inputs.
    """

    def __init__(self, use: ForwardRecord, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._use = use
        self._tensors: Sequence[Tensor] = tensors
        self._masks: RowMasks | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, or what stands in its place."""
        draw = _DRAWS.get(func)
        if draw is None:
            return func(*args, **(kwargs or {}))
        return draw(self, func, args, kwargs or {})

    def dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run dropout of elements or, by the name of ``func``, of channels."""
        value, chance = args[0], kwargs["p"]
        if not kwargs["training"] or not 0.0 < chance <= 1.0:
            return func(*args, **kwargs)
        shape, name = value.shape, func.__name__
        if func is not functional.dropout:
            if len(shape) < _NUM_DIMENSIONS.get(func, 3):
                raise self._no_rows(name, shape)
            shape = torch.Size((*shape[:2], *[1] * (len(shape) - 2)))
        kept = self._mask(name, shape, 1.0 - chance, value.device).to(value.dtype)
        if chance < 1.0:
            kept.div_(1.0 - chance)
        return value.mul_(kept) if kwargs["inplace"] else value * kept

    def bernoulli(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run ``Tensor.bernoulli_``, by which layers are dropped for some samples."""
        value, chance = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        if kwargs.get("generator") is not None or isinstance(chance, Tensor):
            return self.refuse(func, args, kwargs)
        return value.copy_(self._mask("bernoulli_", value.shape, chance, value.device))

    def attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run attention without dropout, as its kernels draw inside."""
        fused = func is functional.scaled_dot_product_attention
        place = 4 if fused else 10  # of the argument
        chance = kwargs.get("dropout_p", args[place] if len(args) > place else 0.0)
        if chance and (fused or kwargs.get("training", True)):
            raise _refused(
                f"`{func.__name__}(dropout_p={chance})`",
                "Set the dropout of attention to 0 (`nn.MultiheadAttention(dropout=0)`, "
                "`layer.self_attn.dropout = 0.0`), write attention out as softmax and dropout "
                f'(`attn_implementation="eager"` in transformers), {_LEAVE_OUT}',
            )
        return func(*args, **kwargs)

    def recurrent(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a recurrent network without dropout between its layers."""
        at = next((at for at, arg in enumerate(args) if isinstance(arg, float)), 0)
        num_layers, chance, training = args[at - 1 : at + 2] if at else (1, 0.0, False)
        if chance and training and num_layers > 1:
            raise _refused(
                f"`{func.__name__}(dropout={chance})`",
                f"Use one layer each, with `nn.Dropout` in between, {_LEAVE_OUT}",
            )
        return func(*args, **kwargs)

    def refuse(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run ``func`` with a generator of its own, or where it draws nothing."""
        if kwargs.get("generator") is not None or kwargs.get("training") is False:
            return func(*args, **kwargs)
        raise _refused(
            f"`{func.__name__}`",
            "Draw in the data set, give it a `generator` that is seeded alike on all ranks, use "
            f"`nn.Dropout`, {_LEAVE_OUT}",
        )

    def _mask(
        self, name: str, shape: torch.Size, chance: float, device: torch.device
    ) -> torch.Tensor:
        """Return a mask whose rows are the samples'."""
        if self._masks is None:
            self._masks = self._open()
        keys = self._use.ticket.keys
        assert keys is not None
        if not shape or shape[0] != len(keys):
            raise self._no_rows(name, shape)
        if _is_checkpointed():
            raise _refused(
                f"`{name}` under activation checkpointing, which runs it again in the backward,",
                f"Keep dropout out of what is checkpointed, {_LEAVE_OUT}",
            )
        self._use.ticket.num_draws += 1
        return self._masks.draw(shape, chance, device)

    def _open(self) -> RowMasks:
        """Return what draws for the samples of this forward, whose batch has to be certain."""
        use = self._use
        match, tensors, self._tensors = use.match, self._tensors, ()
        found = match.tickets if match.is_certain else copied(match.tickets, tensors)
        if len(found) != 1:
            raise RuntimeError(
                "Nothing tells which batch this forward belongs to, and so where its samples are "
                "in the epoch. Name it: `with balancer.step(batch): loss = ...`, with `batch` as "
                "the loader handed it out."
            )
        (ticket,) = found
        if ticket.keys is None:
            raise _refused("a batch whose samples have no place in an epoch", "Use a `DataLoader`.")
        use.ticket = ticket
        use.match = Match((ticket,), match.weight, match.share, is_certain=True)
        return RowMasks(ticket.keys, ticket.num_draws)

    def _no_rows(self, name: str, shape: torch.Size) -> ValueError:
        keys = self._use.ticket.keys
        num_samples = 0 if keys is None else len(keys)
        return _refused(
            f"`{name}` of {tuple(shape)} in a forward of {num_samples} samples",
            "Have samples along the first dimension (`batch_first=True`), one row each, and all "
            f"of a batch in one forward, {_LEAVE_OUT}",
        )


def _refused(got: str, remedy: str) -> ValueError:
    rule = "be used where all that a forward draws can be drawn by sample"
    return invalid(_SETTING, rule, got, remedy)


def _is_checkpointed() -> bool:
    """Return whether a frame of ``torch.utils.checkpoint`` is around this one."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


_NUM_DIMENSIONS: dict[Any, int] = {functional.dropout3d: 5}  # with fewer there is no batch

_REFUSED: tuple[Any, ...] = (
    *(functional.alpha_dropout, functional.feature_alpha_dropout, functional.gumbel_softmax),
    *(functional.rrelu, functional.fractional_max_pool2d_with_indices),
    functional.fractional_max_pool3d_with_indices,
    *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_),
    *(torch.alpha_dropout, torch.native_dropout, torch.bernoulli, torch.binomial),
    *(torch.multinomial, torch.normal, torch.poisson, torch.rand, torch.rand_like),
    *(torch.randint, torch.randint_like, torch.randn, torch.randn_like, torch.randperm),
    *(Tensor.bernoulli, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_),
    *(Tensor.log_normal_, Tensor.multinomial, Tensor.normal_, Tensor.random_, Tensor.uniform_),
)

_DRAWS: dict[Any, Callable[[_DrawMode, Any, Any, Any], Any]] = {
    **dict.fromkeys(_REFUSED, _DrawMode.refuse),
    functional.dropout: _DrawMode.dropout,
    functional.dropout1d: _DrawMode.dropout,
    functional.dropout2d: _DrawMode.dropout,
    functional.dropout3d: _DrawMode.dropout,
    Tensor.bernoulli_: _DrawMode.bernoulli,
    functional.scaled_dot_product_attention: _DrawMode.attention,
    functional.multi_head_attention_forward: _DrawMode.attention,
    torch.lstm: _DrawMode.recurrent,
    torch.gru: _DrawMode.recurrent,
    torch.rnn_tanh: _DrawMode.recurrent,
    torch.rnn_relu: _DrawMode.recurrent,
}
