"""Training data: token files on disk, and one global order of samples that is the same at every world size.

Knows neither torch nor jax. Batches are numpy arrays.
"""

from fullshard.data.batches import Batches, Boundaries, Packing, digest
from fullshard.data.order import Order
from fullshard.data.tokenizer import refuse_different, refuse_other_tokenizer
from fullshard.data.tokens import TokenFile, TokenWriter

__all__ = [
    "Batches",
    "Boundaries",
    "Order",
    "Packing",
    "TokenFile",
    "TokenWriter",
    "digest",
    "refuse_different",
    "refuse_other_tokenizer",
]
