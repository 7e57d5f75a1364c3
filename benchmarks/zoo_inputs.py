"""Inputs for any model: guessed from the names of its forward's arguments, and from what it says of wrong ones."""

import inspect
import re
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import zoo_latents, zoo_patches

ROWS, TOKENS, TARGETS = 2, 12, 7
SAMPLES, MOST_SAMPLES = 2000, 32000  # of a sound
LARGEST_SIDE = 256  # pixels: an image of 1024 takes minutes
ASKED = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)")
NAMED = re.compile(r"`?\b([a-z_]+_(?:ids|values|features|feats|pos|embeds|states|bbox|latents|mask)|bbox|boxes)\b`?")
FEATURES = re.compile(r"features?:?\s*(?:torch\.Size\(\[)?(\d+)")
APART = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
FRAMES = re.compile(r"\(batch_size, (\d+), num_channels")
WIDTH = re.compile(r"expected input with shape \[\*, (\d+)\]")


class Guess:
    """Inputs of one model. `side`: pixels of an image; `channels`, `frames`, `audio`: sizes to try."""

    def __init__(self, model: nn.Module, config: Any, **sizes: Any):
        self.model, self.config, self.sizes = model, config, sizes
        own = inspect.signature(type(model).forward).parameters
        self.parameters = {n for n, p in own.items() if n != "self" and p.kind is not p.VAR_KEYWORD}

    def of(self, names: list[str], seed: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(seed)
        return {name: self._value(name, draw) for name in names}

    def _value(self, name: str, draw: torch.Generator) -> Any:
        made = zoo_latents.value(name, self.sizes, draw) if "latents" in self.sizes else None
        if "grid" in self.sizes:
            made = zoo_patches.value(name, self.sizes, draw)
        return self._guessed(name, draw) if made is None else made

    def _guessed(self, name: str, draw: torch.Generator) -> Any:
        rows = ROWS
        vocabulary = min(_sizes(self.config, r"vocab_size$") or [100])
        ids = lambda n: torch.randint(3, max(4, min(vocabulary, 99)), (rows, n), generator=draw)
        width = self.sizes.get("width") or next(iter(_sizes(self.config, r"^(hidden_size|d_model|n_embd)$")), 32)
        if name in ("input_ids", "sequence_ids"):
            if "MultipleChoice" in type(self.model).__name__:
                return ids(2 * TOKENS).view(rows, 2, TOKENS)
            if each := self.sizes.get("each"):
                return ids(TOKENS * each).view(rows, TOKENS, each)
            rows *= self.sizes.get("codebooks", 1)
            return self._with_images(self._ended(ids(TOKENS)))
        if name.endswith("decoder_input_ids"):
            return ids(TARGETS)
        if name == "state":
            return torch.randn(rows, next(iter(_sizes(self.config, r"state_dim$")), 4), generator=draw)
        if name == "actions":
            sizes = [next(iter(_sizes(self.config, pattern)), 4) for pattern in (r"chunk_size$", r"action_dim$")]
            return torch.randn(rows, *sizes, generator=draw)
        if name == "pixel_attention_mask":
            return torch.ones(rows, self.sizes.get("frames", 1), dtype=torch.bool)
        if name == "flattened_patches":
            width = next(iter(_sizes(self.config, r"patch_embed_hidden_size$")), width)
            values = torch.randn(rows, TOKENS, width, generator=draw)
            return torch.cat([torch.arange(2 * TOKENS).view(1, TOKENS, 2).expand(rows, -1, -1) // 2, values], -1)
        if name.endswith("visual_pos"):
            return torch.rand(rows, TOKENS, 4, generator=draw)
        if name in ("bbox", "boxes"):
            corner = torch.randint(0, 40, (rows, TOKENS, 2), generator=draw)
            return torch.cat([corner, corner + torch.randint(1, 20, (rows, TOKENS, 2), generator=draw)], -1)
        if re.search(r"pixel_values|^image$|^images$|^x$", name):
            return self._pixels(draw)
        if name == "image_attention_mask":
            return torch.ones(rows, TOKENS, self.sizes.get("frames", 1), dtype=torch.int64)
        if name == "pixel_mask":
            side = self.sizes["side"]
            return torch.ones(rows, side, side, dtype=torch.int64)
        if re.search(r"input_values|audio_values|raw_audio|waveform", name):
            return self._audio(draw)
        if re.search(r"input_features_mask|features_attention_mask", name):
            features = self._features(draw)
            return torch.ones(rows, features.shape[1 if "length" in self.sizes else 2], dtype=torch.int64)
        if re.search(r"input_features|spectrogram|decoder_input_values", name):
            return self._features(draw)
        if re.search(r"(past|future)_values|observed_mask|time_features", name):
            return self._series(name, draw)
        if re.search(r"attention_mask$", name):
            return torch.ones(rows, TARGETS if "decoder" in name else TOKENS, dtype=torch.int64)
        if name in ("timestep", "timesteps", "t"):
            return torch.randint(0, 100, (rows,), generator=draw).float() if self.sizes.get("float_time") else torch.tensor(3)
        if name == "class_labels":
            return torch.randint(0, 4, (rows,), generator=draw)
        if re.search(r"labels$", name):
            return torch.randint(0, 2, (rows,), generator=draw)
        if "ids" in name:
            return ids(TOKENS)
        return torch.randn(rows, TOKENS, width, generator=draw)

    def _ended(self, ids: Tensor) -> Tensor:
        """The tokens, with the end of a text at the end if the model asked for it."""
        end = next(iter(_sizes(self.config, r"eos_token_id$")), 2)
        return torch.cat([ids[:, :-1], torch.full((len(ids), 1), end)], 1) if self.sizes.get("ends") else ids

    def _with_images(self, ids: Tensor) -> Tensor:
        """The tokens, with so many of an image (or sound) as the model asked for, in every row."""
        count = self.sizes.get("places", 0)
        token = next(iter(_sizes(self.config, self.sizes.get("token", r"(image|audio|video)_token_(id|index)$"))), None)
        if not count or token is None:
            return ids
        return torch.cat([ids[:, :2], torch.full((len(ids), count), token), ids[:, 2:]], 1)

    def _pixels(self, draw: torch.Generator) -> Tensor:
        side, channels = self.sizes["side"], self.sizes.get("channels") or next(iter(_sizes(self.config, r"num_channels$")), 3)
        frames = self.sizes.get("frames")
        return torch.randn(ROWS, *([frames] if frames else []), channels, side, self.sizes.get("wide", side), generator=draw)

    def _audio(self, draw: torch.Generator) -> Tensor:
        if self.sizes.get("audio") == "spectrogram":
            return torch.randn(ROWS, self.sizes["length"], next(iter(_sizes(self.config, r"num_mel_bins$")), 80), generator=draw)
        if self.sizes.get("audio") == "channel":
            return torch.randn(ROWS, 1, self.sizes.get("samples", SAMPLES), generator=draw)
        return torch.randn(ROWS, self.sizes.get("samples", SAMPLES), generator=draw)

    def _features(self, draw: torch.Generator) -> Tensor:
        names = (r"num_mel_bins$", r"feature_size|input_feat_per_channel|n_mels|input_channels")
        bins = next((n for pattern in names for n in _sizes(self.config, pattern)), 80)
        source = next(iter(_sizes(self.config, r"max_source_positions$")), 32)
        if self.sizes.get("audio") == "spectrogram":
            return torch.randn(ROWS, self.sizes["length"], self.sizes.get("width") or bins, generator=draw)
        return torch.randn(ROWS, bins, 2 * source, generator=draw)

    def _series(self, name: str, draw: torch.Generator) -> Tensor:
        config = self.config
        context = getattr(config, "context_length", 32) or 32
        if "future" in name:
            context = getattr(config, "prediction_length", 8) or 8
        else:
            context += max(getattr(config, "lags_sequence", None) or [0]) if self.sizes.get("lags", True) else 0
        if "time_features" in name:
            return torch.randn(ROWS, context, getattr(config, "num_time_features", 1), generator=draw)
        channels = getattr(config, "num_input_channels", 0) or getattr(config, "input_size", 1)
        shape = (ROWS, context, channels) if channels > 1 or hasattr(config, "num_input_channels") else (ROWS, context)
        return torch.ones(shape) if "mask" in name else torch.randn(shape, generator=draw)


def _sizes(config: Any, pattern: str, depth: int = 0) -> list[int]:
    """The whole numbers of a configuration and those inside whose name matches, outer ones first."""
    if config is None or depth > 3:
        return []
    values = vars(config) if hasattr(config, "__dict__") else dict(config)
    found = [v for k, v in values.items() if isinstance(v, int) and not isinstance(v, bool) and re.search(pattern, k)]
    inner = [v for k, v in values.items() if k.endswith("config") and hasattr(v, "to_dict")]
    return found + [v for c in inner for v in _sizes(c, pattern, depth + 1)]


def _shape(config: Any) -> list[int]:
    """Height and width of an image that is no square."""
    shape = getattr(config, "image_size", None)
    return list(shape) if isinstance(shape, list | tuple) and len(set(shape)) == 2 else []


def find(model: nn.Module, config: Any, call: Any, tries: int = 32) -> tuple[Guess, list[str]]:
    """Inputs that the model takes. `call(values)` runs it and raises. The error of the first guess, if none fits."""
    first: Exception | None = None
    for names, sizes in _guesses(model, config):
        guess, names, sizes = Guess(model, config, **sizes), list(names), dict(sizes)
        for _ in range(8 if "latents" in sizes else 5):
            tries -= 1
            try:
                call(guess.of(names, 0))
                return guess, names
            except Exception as error:  # the next guess
                first = first or error
                if tries <= 0 or not _learn(error, guess, names):
                    break
        if tries <= 0:
            break
    assert first is not None
    raise first


def _learn(error: Exception, guess: Guess, names: list[str]) -> bool:
    """Add what the error asks for. False if it asks for nothing new."""
    text = str(error)
    if asked := ASKED.search(text):
        new = [n for n in re.findall(r"'(\w+)'", asked[1]) if n not in names]
        names += new
        return bool(new)
    if "latents" in guess.sizes and zoo_latents.learn(text, guess.sizes):
        return True
    if "grid" in guess.sizes and zoo_patches.learn(text, guess.sizes):
        return True
    if "token" in text and "feature" in text and (count := FEATURES.search(text)) and not guess.sizes.get("places"):
        guess.sizes["places"] = max(1, int(count[1]) // ROWS)
        return True
    if _learn_length(text, guess):
        return True
    if (frames := FRAMES.search(text)) and guess.sizes.get("frames") != int(frames[1]):
        guess.sizes["frames"] = int(frames[1])
        return True
    if (width := WIDTH.search(text)) and guess.sizes.get("width") != int(width[1]):
        guess.sizes["width"] = int(width[1])
        return True
    named = [*NAMED.findall(text), *(_absent(error) if "None" in text else ())]
    named += [f"decoder_{n}" for n in named]
    new = [n for n in named if n in guess.parameters and n not in names and not n.endswith("embeds")]
    names += new[:1]
    if new[:1] == ["pixel_attention_mask"]:
        guess.sizes.setdefault("frames", 2)
    return bool(new)


def _learn_length(text: str, guess: Guess) -> bool:
    """Take a text's end, more samples of a sound or more rows of tokens, if an error asks for them."""
    sizes = guess.sizes
    if "<eos>" in text and not sizes.get("ends"):
        sizes["ends"] = True
        return True
    if "Kernel size can't be greater" in text and sizes.get("samples", SAMPLES) < MOST_SAMPLES:
        sizes["samples"] = 4 * sizes.get("samples", SAMPLES)
        return True
    if sizes.get("audio") == "spectrogram" and (told := zoo_patches.TOLD.search(text)) and sizes.get("width") != int(told[2]):
        sizes["width"] = int(told[2])
        return True
    books = _sizes(guess.config, r"num_codebooks$") if "is invalid for input of size" in text else []
    if books and "codebooks" not in sizes:
        sizes["codebooks"] = books[0]
        return True
    apart = APART.search(text)
    if apart and int(apart[1]) == TOKENS and int(apart[2]) - 1 in _sizes(guess.config, r"num_codebooks$"):
        sizes["each"] = int(apart[2])
        return True
    return False


def _absent(error: Exception) -> list[str]:
    """What the lines around the error name, the innermost first: one of them may be an argument that is None."""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    return [name for line in reversed(lines[-12:]) for name in re.findall(r"\b[a-z_]+\b", line)]


def _latents(model: nn.Module) -> Iterator[tuple[list[str], dict[str, Any]]]:
    taken = [
        p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty or p.name in zoo_latents.TAKEN
    ]
    for layout in zoo_latents.layouts(type(model).__name__):
        axes = len(getattr(model.config, "axes_dims_rope", None) or (0, 0, 0))
        channels = getattr(model.config, "in_channels", None) or zoo_latents.CHANNELS
        yield [p.name for p in taken], {"side": zoo_latents.SIDE, "latents": layout, "axes": axes, "channels": channels}


def _guesses(model: nn.Module, config: Any) -> Iterator[tuple[list[str], dict[str, Any]]]:
    parameters = [n for n in inspect.signature(type(model).forward).parameters if n != "self"]
    if type(model).__module__.startswith("diffusers."):
        yield from _latents(model)
    main = getattr(model, "main_input_name", parameters[0])
    asked = [n for n in _sizes(config, r"image_size$|img_size$")[:2] if n <= LARGEST_SIDE]
    sides = [*dict.fromkeys([*asked, 32, 64, 224])]
    yield from zoo_patches.guesses(parameters, main, lambda pattern, default: next(iter(_sizes(config, pattern)), default))
    if "pixel_values" in parameters:
        text = ["input_ids"] if "input_ids" in parameters else []
        if len(shape := _shape(config)) == 2:
            yield [*text, "pixel_values"], {"side": shape[0], "wide": shape[1]}
        for side in sides:
            yield [*text, "pixel_values"], {"side": side}
        yield [*text, "pixel_values"], {"side": sides[0], "frames": next(iter(_sizes(config, r"num_frames$")), 4)}
    if "pixel_values_videos" in parameters and "pixel_values" not in parameters:
        yield ["pixel_values_videos"], {"side": sides[0], "frames": next(iter(_sizes(config, r"frames")), 4)}
    for name in ("input_values", "input_features", "audio_values"):
        if name in parameters:
            text = ["input_ids"] if "input_ids" in parameters else []
            yield [*text, name], {"side": sides[0]}
            yield [*text, name], {"side": sides[0], "audio": "channel"}
            for length in (*_sizes(config, r"max_length$")[:1], 40, 128):
                yield [*text, name], {"side": sides[0], "audio": "spectrogram", "length": length}
    if "past_values" in parameters:
        yield ["past_values"], {}
        yield ["past_values"], {"lags": False}
    if "input_ids" in parameters:
        yield ["input_ids"], {"side": sides[0]}
    for side in sides:
        yield [main if main in parameters else parameters[0]], {"side": side}
