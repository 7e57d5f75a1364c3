"""Data: token files on disk, and one global order of samples that is the same at every world size.

Knows neither torch nor jax: what it hands out are numpy arrays.
"""

from fullshard.data.batches import Batches
from fullshard.data.order import Order
from fullshard.data.tokens import TokenFile, TokenWriter

__all__ = ["Batches", "Order", "TokenFile", "TokenWriter"]
