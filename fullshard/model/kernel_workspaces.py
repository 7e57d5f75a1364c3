"""Workspaces of CUDA kernels: what they allocate for themselves and free before they return. No tensor shows them.

A trace names one of these functions and its arguments; the planner asks it for the bytes. Measured on an H200 with torch
2.11 by `benchmarks/memory_probe.py`; each docstring names the kernel. Standard library only.
"""

from collections.abc import Callable

from fullshard.cluster.calibration import HOPPER

CUBLAS_WORKSPACE = int(HOPPER.cublas_workspace)
MULTIPROCESSORS = int(HOPPER.multiprocessors)


def attention_backward(rows: int, heads: int, key_heads: int, tokens: int, keys: int, width: int, item: int) -> tuple[int, ...]:
    """cuDNN: the queries' gradient in fp32, a float for each row of the softmax, 256 bytes. With fewer key heads than heads,
    also the gradients of keys and values for every head, before they are summed."""
    queries = rows * heads * tokens * width
    grouped = 2 * item * rows * heads * keys * width if key_heads != heads else 0
    return (4 * queries + grouped + 4 * rows * heads * tokens + 256,)


def flash_attention_backward(
    rows: int, heads: int, key_heads: int, tokens: int, keys: int, width: int, item: int
) -> tuple[int, ...]:
    """FlashAttention 2: as cuDNN, and as much again as the queries' gradient in fp32."""
    (workspace,) = attention_backward(rows, heads, key_heads, tokens, keys, width, item)
    return (workspace + 4 * rows * heads * tokens * width,)


def efficient_attention_backward(rows: int, heads: int, tokens: int, width: int) -> tuple[int, ...]:
    """Memory-efficient attention in fp32: an accumulator for the queries' gradient, and a float for each row."""
    return 4 * rows * heads * tokens * width + 8192, 4 * rows * heads * tokens


def safe_softmax(rows: int, columns: int) -> tuple[int, ...]:
    """The softmax of unfused attention: a mask of the entries that are -inf, and one of the rows that are nothing else."""
    return rows * columns, rows


def softmax_backward(numel: int, item: int) -> tuple[int, ...]:
    """SoftMax.cu: the product of gradient and result."""
    return (item * numel,)


def embedding_backward(indices: int, rows: int, width: int) -> tuple[int, ...]:
    """EmbeddingBackwardKernel.cu: nothing for up to 3072 indices. Else the sorted indices and their origins, and fp32 partial
    sums, one for each segment and one for every ten indices."""
    if indices <= 3072:
        return ()
    segments = min(indices, rows)
    partial = segments + indices // 10
    return *[8 * indices] * 3, *[8 * segments] * 2, 8 * partial, 4 * partial * width


def sum_rows(rows: int, columns: int) -> tuple[int, ...]:
    """Reduce.cuh, a sum over the outer dims in fp32: partial sums of the thread blocks that share an output."""
    vector = next(v for v in (4, 2, 1) if columns % v == 0)
    groups, threads = columns // vector, 512 // vector
    width = min(_power(groups), 32)
    height = min(_power(rows), threads // width)
    width = min(_power(groups), threads // height)
    each = -(-rows // height)  # values a thread adds up
    grid = -(-groups // width)
    target = MULTIPROCESSORS * (2048 // (width * height))
    if each < 256 or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-each // 16)), -(-each // 256))
    return (4 * columns * blocks * width * vector, 64) if blocks > 1 else ()


def sort(items: int) -> tuple[int, ...]:
    """CUB radix sort of int64 keys with their positions: a second copy of the keys, and its own space."""
    return 8 * items, 16 * items + 18_432


def layout_copies(*tensors: int) -> tuple[int, ...]:
    """cuDNN's convolutions: copies of `tensors` bytes each, with channels last, of what a product reads and writes."""
    return (sum(tensors),)


def chunk_cat(count: int, *shards: int) -> tuple[int, ...]:
    """torch._chunk_cat of `count` tensors whose chunks have `shards` bytes: an index for every 2 KiB of a chunk."""
    return (16 + 48 * count + 8 * sum(-(-s // 2048) for s in shards),)


def _power(value: int) -> int:
    """The largest power of two up to `value`."""
    return 1 << (value.bit_length() - 1) if value else 1


WORKSPACES: dict[str, Callable[..., tuple[int, ...]]] = {
    "attention_backward": attention_backward,
    "flash_attention_backward": flash_attention_backward,
    "efficient_attention_backward": efficient_attention_backward,
    "safe_softmax": safe_softmax,
    "softmax_backward": softmax_backward,
    "embedding_backward": embedding_backward,
    "sum_rows": sum_rows,
    "sort": sort,
    "layout_copies": layout_copies,
    "chunk_cat": chunk_cat,
}
