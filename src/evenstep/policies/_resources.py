"""Which policies want to know what the machines have to spare."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..prediction import AbstractPredictor


def reads_resources(policy: Any) -> bool:
    """Tell whether ``policy`` stands on a predictor that reads CPU and memory, at any depth.

    Reading them costs every worker a tenth of a millisecond a step, so drivers ask first.
    """
    if isinstance(policy, AbstractPredictor):
        return policy.reads_resources
    if isinstance(policy, (tuple, list)):
        return any(map(reads_resources, policy))
    if not dataclasses.is_dataclass(policy):
        return False
    return any(reads_resources(getattr(policy, field.name)) for field in dataclasses.fields(policy))
