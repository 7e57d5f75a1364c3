"""Training data: token files, tables, images and data sets of the user, in one order of samples at every world size.

Knows neither torch nor jax. Token batches are numpy arrays.
"""

from fullshard.data.batches import Batches, Boundaries, Packing, digest
from fullshard.data.order import Order
from fullshard.data.sample_batches import SampleBatches, SampleRules, StreamBatches
from fullshard.data.tokenizer import refuse_different, refuse_other_tokenizer
from fullshard.data.tokens import TokenFile, TokenWriter

__all__ = [
    "Batches",
    "Boundaries",
    "Order",
    "Packing",
    "SampleBatches",
    "SampleRules",
    "StreamBatches",
    "TokenFile",
    "TokenWriter",
    "digest",
    "refuse_different",
    "refuse_other_tokenizer",
]
