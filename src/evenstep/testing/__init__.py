"""Proofs to run on your own policies; needs ``pip install evenstep[testing]``."""

import pytest

pytest.register_assert_rewrite("evenstep.testing._policy_contract")

from ._policy_contract import AdaptivePolicyContract as AdaptivePolicyContract  # noqa: E402
from ._policy_contract import PolicyContract as PolicyContract  # noqa: E402
from ._workers import WorkerFailed as WorkerFailed  # noqa: E402
from ._workers import run_workers as run_workers  # noqa: E402

__all__ = ["AdaptivePolicyContract", "PolicyContract", "WorkerFailed", "run_workers"]
