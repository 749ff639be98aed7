"""Who computes which samples inside a step, and how many steps go by between two averages."""

from ._base import AbstractScheme as AbstractScheme
from ._base import Chunk as Chunk
from ._base import Planned as Planned
from ._base import Turn as Turn
from ._bsp import Bsp as Bsp
from ._factoring import Factoring as Factoring
from ._hybrid import Hybrid as Hybrid
from ._hybrid import HybridState as HybridState
from ._local_sgd import LocalSgd as LocalSgd
from ._stealing import Piece as Piece
from ._stealing import Progress as Progress
from ._stealing import Stealing as Stealing
from ._stealing import StealingState as StealingState
from ._step_claims import Claim as Claim
from ._step_claims import StepClaims as StepClaims

__all__ = [
    "AbstractScheme",
    "Bsp",
    "Chunk",
    "Claim",
    "Factoring",
    "Hybrid",
    "HybridState",
    "LocalSgd",
    "Piece",
    "Planned",
    "Progress",
    "Stealing",
    "StealingState",
    "StepClaims",
    "Turn",
]
