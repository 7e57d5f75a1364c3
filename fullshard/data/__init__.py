"""Training data: token files, tables, images and data sets of the user, in one order of samples at every world size.

Knows neither torch nor jax. Token batches are numpy arrays.
"""

from fullshard.data.sample_batches import SampleBatches, SampleRules, StreamBatches
from fullshard.data.sample_order import Order
from fullshard.data.token_batches import Batches, Boundaries, Packing, digest
from fullshard.data.token_files import TokenFile, TokenWriter
from fullshard.data.tokenizer import refuse_different, refuse_other_tokenizer

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
