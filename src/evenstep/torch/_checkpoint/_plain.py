"""Whether a state can be read again without running code that a file asks for."""

from __future__ import annotations

import io
from typing import Any

import torch

from ...exceptions import invalid


def check_plain(argument: str, state: Any) -> None:
    """Raise unless ``state`` loads again as it is written, with ``weights_only=True``."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # pickle's and torch's own, of many kinds
        raise invalid(
            f"Checkpoint({argument}=...)",
            "have a state of plain values and tensors",
            reason(error),
            "Give it a `state_dict` that `torch.load(weights_only=True)` reads.",
        ) from error


def reason(error: Exception) -> str:
    """Return the one line that says it: torch's advice on what to trust stands around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Unpickler error: " in line]
    return [*telling, *lines, type(error).__name__][0]
