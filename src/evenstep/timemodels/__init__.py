"""What a batch costs a worker: seconds and memory against samples."""

from ._affine import AffineTime as AffineTime
from ._base import AbstractTimeModel as AbstractTimeModel
from ._base import bisect_batch as bisect_batch
from ._memory import MemoryModel as MemoryModel
from ._table import TableTime as TableTime

__all__ = ["AbstractTimeModel", "AffineTime", "MemoryModel", "TableTime", "bisect_batch"]
