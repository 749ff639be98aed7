"""Load-balanced data-parallel training on heterogeneous workers."""

from ._types import Cluster as Cluster
from ._types import Decision as Decision
from ._types import Resources as Resources
from ._types import StepTimings as StepTimings
from .solve._allocate import allocate as allocate
from .solve._allocate import apportion as apportion
from .timemodels._curves import AffineTime as AffineTime

__all__ = ["AffineTime", "Cluster", "Decision", "Resources", "StepTimings", "allocate", "apportion"]
__version__ = "0.1.0"
