"""The batches that a model is traced with: rows of tokens, or batches like an example."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.base.errors import FullshardError, a_kind
from fullshard.model.costs import Example, Polynomial
from fullshard.on_torch.tensors.batch_tree import BATCH, is_tree, leaves, map_tensors, row_count
from fullshard.on_torch.tracing.meta_values import DISCRETE, MAX_ELEMENTS

# Rows of the batches that are traced: two determine a line, the third checks it. One row is left out: torch skips sums
# over a single row.
ROWS = (2, 3, 5)
NOTES = {
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d): (
        "of cuDNN's workspace for convolutions only the copies between layouts are counted: the rest depends on the algorithm"
    ),
    (nn.LSTM, nn.GRU, nn.RNN): "recurrent layers are counted step by step; cuDNN's fused kernels need other memory and time",
}


@dataclass(frozen=True)
class TraceBatch:
    """A batch on meta. `tensors`: each with its values, if the model may read them."""

    tree: Any
    tensors: list[tuple[Tensor, Tensor | None]]


def token_batch(rows: int, tokens: int) -> TraceBatch:
    """A batch of a language model."""
    ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
    tree = {"input_ids": ids, "labels": torch.empty_like(ids)}
    return TraceBatch(tree, [(t, torch.zeros(rows, tokens, dtype=torch.int64)) for t in tree.values()])


class ExampleBatches:
    """Batches like an example, of any number of rows."""

    def __init__(self, example: Any):
        if not is_tree(example) or not any(True for _ in leaves(example)):
            raise FullshardError(f"an example is a batch as train_step takes it, not {a_kind(example)}; {BATCH}")
        self.example = map_tensors(example, lambda _, t: t.detach())
        self.named = list(leaves(self.example))
        shared = row_count(self.example)
        self.can_grow = shared is not None
        self.rows = shared or next((t.shape[0] for _, t in self.named if t.ndim), 1)

    def of(self, rows: int) -> TraceBatch:
        """A batch of so many rows, on meta. The example's rows repeat."""
        tensors: list[tuple[Tensor, Tensor | None]] = []

        def make(_: str, tensor: Tensor) -> Tensor:
            shape = (rows, *tensor.shape[1:]) if self.can_grow and tensor.ndim else tuple(tensor.shape)
            order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # of an image, channels may lie last
            made = torch.empty_permuted(shape, order, dtype=tensor.dtype, device="meta")
            tensors.append((made, _values(tensor, shape)))
            return made

        return TraceBatch(map_tensors(self.example, make), tensors)

    def about(self, model: nn.Module) -> Example:
        """What a plan and an estimate say about the example."""
        kinds = {type(m) for m in model.modules()}
        notes = tuple(note for layers, note in NOTES.items() if any(issubclass(k, layers) for k in kinds))
        inputs = {path or "batch": self._bytes(t) for path, t in self.named}
        return Example(self._dims(), self.rows, inputs, notes)

    def _bytes(self, tensor: Tensor) -> Polynomial:
        total = tensor.numel() * tensor.element_size()
        if not self.can_grow or not tensor.ndim:
            return (total, 0, 0, 0, 0, 0)
        return (0, 0, 0, total // max(tensor.shape[0], 1), 0, 0)

    def _dims(self) -> str:
        """The different shapes of a row, such as `3×224×224`."""
        shapes = Counter(t.shape[1:] if self.can_grow else t.shape for _, t in self.named if t.ndim)
        return ", ".join("×".join(map(str, shape)) for shape in shapes if shape) or "1"


def _values(tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The values of integers and booleans, which a model may branch on; zeros if the example has none."""
    if tensor.dtype not in DISCRETE or torch.Size(shape).numel() > MAX_ELEMENTS:
        return None
    if tensor.is_meta or not tensor.numel():
        return torch.zeros(shape, dtype=tensor.dtype)
    if tensor.shape == shape:
        return tensor.cpu().clone()
    times = -(-shape[0] // tensor.shape[0])
    return tensor.cpu().repeat(times, *[1] * (tensor.ndim - 1))[: shape[0]].clone()
