"""Proofs to run on your own policies; needs the extra ``testing``."""

try:
    import pytest
except ModuleNotFoundError as error:
    from .._install import install_line

    message = f"`evenstep.testing` needs pytest: `{install_line('testing')}`."
    raise ImportError(message) from error

pytest.register_assert_rewrite("evenstep.testing._contracts")

from ._contracts import AdaptivePolicyContract as AdaptivePolicyContract  # noqa: E402
from ._contracts import PolicyContract as PolicyContract  # noqa: E402
from ._contracts import PredictorContract as PredictorContract  # noqa: E402
from ._workers import WorkerFailed as WorkerFailed  # noqa: E402
from ._workers import run_workers as run_workers  # noqa: E402

__all__ = [
    "AdaptivePolicyContract",
    "PolicyContract",
    "PredictorContract",
    "WorkerFailed",
    "run_workers",
]
