"""Inputs of diffusers' models: latents in each layout that they may have, and texts, whose widths errors tell."""

import re
from collections.abc import Sequence
from typing import Any

import torch

ROWS, SIDE, FRAMES, WORDS, CHANNELS = 2, 8, 4, 8, 4
LAYOUTS = ("image", "packed", "video", "frames first", "signal")
MOVING = re.compile("3D|Video|Motion|Temporal|I2V")  # in the name of a class that takes a video
TAKEN = (
    "encoder_hidden_states",
    "timestep",
    "pooled_projections",
    "img_ids",
    "txt_ids",
    "controlnet_cond",
)  # given though they have a default
WIDTHS = (37, 41, 43, 47, 53, 59, 61)  # of inputs until an error asks for others: no two are equal
TOLD = (
    re.compile(r"shapes cannot be multiplied \(\d+x(?P<got>\d+) and (?P<asked>\d+)x\d+\)"),
    re.compile(r"size of tensor a \((?P<got>\d+)\) must match the size of tensor b \((?P<asked>\d+)\)"),
    re.compile(r"Expected size (?P<asked>\d+) but got size (?P<got>\d+)"),
    re.compile(r"normalized_shape=\[(?P<asked>\d+)\].*size\s*\[(?:\d+, )*(?P<got>\d+)\]"),
)
TOLD_CHANNELS = re.compile(r"to have (\d+) channels, but got (\d+) channels")


def layouts(kind: str) -> Sequence[str]:
    first = "signal" if "1D" in kind else "video" if MOVING.search(kind) else "image"
    return sorted(LAYOUTS, key=lambda layout: (layout != first, layout != "frames first" or first != "video"))


def value(name: str, sizes: dict[str, Any], draw: torch.Generator) -> Any:
    """An input by its name; None for a name that is not of diffusers."""
    if name in ("sample", "hidden_states", "x"):
        return torch.randn(ROWS, *_latents(name, sizes), generator=draw)
    if name == "controlnet_cond":
        return torch.randn(ROWS, 3, 8 * SIDE, 8 * SIDE, generator=draw)
    if name in ("image_latents", "control_latents"):
        return torch.randn(ROWS, *_latents("sample", sizes), generator=draw)
    if "mask" in name:
        return torch.ones(ROWS, WORDS)
    if name.startswith("encoder_hidden_states") or name in ("cap_feats", "image_embeds", "image_embeddings"):
        return torch.randn(ROWS, WORDS, width(name, sizes), generator=draw)
    if name.startswith("pooled") or name == "added_time_ids":
        return torch.randn(ROWS, width(name, sizes), generator=draw)
    if name in ("img_ids", "txt_ids"):
        return torch.zeros(SIDE * SIDE if name == "img_ids" else WORDS, sizes.get("axes", 3))
    if name in ("timestep", "timesteps", "t", "r_timestep", "timestep_ratio", "guidance", "fps"):
        return torch.rand(ROWS, generator=draw) * (1 if name == "timestep_ratio" else 50)
    if name in ("original_size", "target_size", "crop_coords"):
        return torch.full((ROWS, 2), 8.0)
    packed = sizes["latents"] == "packed"
    if name == "img_shapes":
        return [[(1, SIDE, SIDE)]] * ROWS
    return {"num_frames": 1 if packed else FRAMES, "height": SIDE, "width": SIDE}.get(name)


def width(name: str, sizes: dict[str, Any]) -> int:
    """The last dim of an input: one of its own until an error has told another."""
    known = sizes.setdefault("widths", {})
    return known.setdefault(name, WIDTHS[len(known) % len(WIDTHS)])


def _latents(name: str, sizes: dict[str, Any]) -> tuple[int, ...]:
    channels = sizes.get("channels", CHANNELS)
    match sizes["latents"]:
        case "packed":
            return SIDE * SIDE, width(name, sizes)
        case "video":
            return channels, FRAMES, SIDE, SIDE
        case "frames first":
            return FRAMES, channels, SIDE, SIDE
        case "signal":
            return channels, SIDE * SIDE
    return channels, SIDE, SIDE


def learn(text: str, sizes: dict[str, Any]) -> bool:
    """Take a width that an error asks for. False if it asks for none."""
    if found := TOLD_CHANNELS.search(text):
        asked, before = int(found[1]), sizes.get("channels", CHANNELS)
        sizes["channels"] = asked
        return asked != before
    for found in filter(None, (pattern.search(text) for pattern in TOLD)):
        got, asked = int(found["got"]), int(found["asked"])
        for name, known in sizes.get("widths", {}).items():
            if known == got != asked:
                sizes["widths"][name] = asked
                return True
        channels = sizes.get("channels", CHANNELS)
        patch = got // channels  # pixels, each of so many channels
        if got != asked and patch and got == patch * channels and asked % patch == 0:
            sizes["channels"] = asked // patch
            return True
    return False
