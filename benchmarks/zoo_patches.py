"""Inputs of models that take an image as patches, with the height and width of their grid."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

TOLD = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
ROWS, TOKENS, PLACES, SIDE = 2, 12, 4, 4  # rows of a batch, tokens of its texts, places of an image there, patches a side


def guesses(parameters: Sequence[str], main: str, size: Callable[[str, int], int]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Names of inputs and their sizes. `size(pattern, default)`: a number of the configuration."""
    channels = size(r"^(num_channels|in_channels|in_chans)$", 3)
    side = size(r"^patch_size$", 8)
    merged = size(r"^(spatial_merge_size|merge_size)$", 1)
    sizes = {
        "grid": (1, 2 * merged, 2 * merged),
        "patch": channels * size(r"^temporal_patch_size$", 1) * side**2,
        "places": PLACES,
        "token": r"image_token_(id|index)$",
        "side": 32,
    }
    text = [n for n in ("input_ids", "mm_token_type_ids") if n in parameters]
    if "image_grid_thw" in parameters:
        yield [*text, "pixel_values", "image_grid_thw"], sizes
    if "grid_thw" in parameters:
        yield [main if main in parameters else parameters[0], "grid_thw"], sizes
    if "spatial_shapes" in parameters:
        more = {"patch": channels * side**2, "places": 0}
        yield [*text, "pixel_values", "pixel_attention_mask", "spatial_shapes"], sizes | more | {"grid": (SIDE, SIDE)}


def learn(text: str, sizes: dict[str, Any]) -> bool:
    """Take the width of a patch if an error asks for another."""
    if (told := TOLD.search(text)) and int(told[1]) == sizes["patch"] != int(told[2]):
        sizes["patch"] = int(told[2])
        return True
    return False


def value(name: str, sizes: dict[str, Any], draw: torch.Generator) -> Any:
    """An input by its name; None for a name that has nothing to do with patches."""
    grid, width = sizes["grid"], sizes["patch"]
    if name in ("pixel_values", "hidden_states"):
        rows = (ROWS, math.prod(grid)) if len(grid) == 2 else (ROWS * math.prod(grid),)
        return torch.randn(*rows, width, generator=draw)
    if name in ("image_grid_thw", "grid_thw", "spatial_shapes"):
        return torch.tensor([grid] * ROWS)
    if name == "pixel_attention_mask":
        return torch.ones(ROWS, math.prod(grid), dtype=torch.int64)
    if name == "mm_token_type_ids":
        return torch.tensor([[0, 0, *[1] * PLACES, *[0] * (TOKENS - 2)]] * ROWS)
    return None
