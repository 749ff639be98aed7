"""Lightning itself, under the name by which it is installed."""

from __future__ import annotations

from typing import Any

_Base: Any
try:
    from lightning.pytorch import Callback as _Base
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback as _Base
    except ModuleNotFoundError as error:
        from .._install import install_line

        message = f"`evenstep.lightning` needs Lightning: `{install_line('lightning')}`."
        raise ImportError(message) from error

CallbackBase: Any = _Base
"""What a callback derives from: command lines of Lightning accept nothing else."""
