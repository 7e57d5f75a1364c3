"""A model from its number of parameters alone, such as `7B`: a preset near that size, or part of one.

The rule: a preset within 5% of the size, Llama before GPT, the nearest first. Else the smallest preset that is larger, with as
many of its layers as come within 10%. Both have their traced costs, so neither needs torch.
"""

import re
from dataclasses import dataclass, replace

from fullshard.base.errors import FullshardError
from fullshard.base.text import count_text
from fullshard.model.description import Description
from fullshard.model.presets import PRESETS, LlamaSize, describe, parameters
from fullshard.model.reduced_description import reduced_description

SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMBT])", re.I)
SCALE = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
NEAR = 0.05  # a preset stands for sizes that differ from its own by at most this share
FAR = 0.1  # and a preset with fewer layers for those within this


@dataclass(frozen=True)
class SizedModel:
    """The model that a size stands for, and its shape in words."""

    description: Description
    shape: str


def looks_like_size(text: str) -> bool:
    """True for a number and one letter, also for letters that are no unit: `7B`, `7Q`."""
    return re.fullmatch(r"[\d.,]+[a-z]?", text, re.I) is not None


def parse_size(text: str) -> float:
    """Parameters of a size such as `7B`, `1.5B` or `350M`."""
    match = SIZE.fullmatch(text)
    if match is None or not float(match[1]):
        raise FullshardError(f"{text!r} is no size of a model; write a number with K, M, B or T, such as 7B or 1.5B")
    return float(match[1]) * SCALE[match[2].upper()]


def model_of_size(text: str) -> SizedModel:
    """The model that stands for a size, such as `7B`."""
    wanted = parse_size(text)
    near = [name for name in PRESETS if abs(parameters(name) / wanted - 1) <= NEAR]
    if near:
        name = min(near, key=lambda n: (not isinstance(PRESETS[n], LlamaSize), abs(parameters(n) - wanted)))
        return SizedModel(describe(name), PRESETS[name].words())
    return _with_fewer_layers(text, wanted)


def _with_fewer_layers(text: str, wanted: float) -> SizedModel:
    larger = sorted((name for name in PRESETS if parameters(name) > wanted), key=parameters)
    if not larger:
        name = max(PRESETS, key=parameters)
        raise FullshardError(
            f"no preset has {text} parameters; the largest, {name}, has {count_text(parameters(name))}: write a size up to that"
        )
    for name in larger:
        full = describe(name)
        blocks = [u.numel for u in full.units if u.kind == "block"]
        layers = max(1, round((wanted - full.numel + sum(blocks)) / blocks[0]))
        reduced = reduced_description(full, layers)
        if abs(reduced.numel / wanted - 1) <= FAR:
            title = f"{name} with {layers} of its {len(blocks)} layers"
            return SizedModel(replace(reduced, model=title), PRESETS[name].words(layers))
    raise FullshardError(f"no preset with fewer layers comes within {FAR:.0%} of {text}; write another size, or a preset")
