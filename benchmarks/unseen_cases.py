"""The configurations of `unseen_models`: shapes whose predictions missed, and models of other kinds.

Each has a `why`: how far the prediction was off when it was first measured, or what kind of model it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.any_model import LABELS, cross_entropy, hugging_face
from fullshard import on_torch
from fullshard.model.presets import LlamaSize, preset
from fullshard.on_torch.model.built_in import GPT, Llama

VOCABULARY = 1000  # from which the tokens of examples are drawn: every model has as many
Size = dict[str, Any]


@dataclass(frozen=True)
class UnseenCase:
    """A model, its batch and how it is trained. `size`: what `make` takes; `less`: in its place for a tiny model."""

    why: str
    make: Callable[..., nn.Module]
    size: Size
    less: Size
    rows: int
    tokens: int = 1024
    batch: Callable[[int], Any] | None = None  # of rows; by default tokens and labels
    loss: Any = None
    mesh: Size = field(default_factory=lambda: {"devices": 1})
    strategy: str = "zero3"
    accumulate: int = 1
    remat: str = "none"
    compile: bool = False

    @property
    def devices(self) -> int:
        return self.mesh["devices"] if "devices" in self.mesh else self.mesh["replicate"] * self.mesh["shard"]

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return self.make(**self.size).train()

    def tiny(self) -> "UnseenCase":
        """The same kind of model in seconds on a CPU: eager, since compiling takes minutes there."""
        return replace(self, size=self.size | self.less, rows=min(self.rows, 2), tokens=64, compile=False)


# -- models ------------------------------------------------------------------------------------------------


def built_in(name: str, **change: Any) -> nn.Module:
    size = replace(preset(name), **change)
    return Llama(size) if isinstance(size, LlamaSize) else GPT(size)


class Convolutions(nn.Module):
    """Two convolutions with GroupNorm and a residual connection."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.first_norm, self.first = nn.GroupNorm(8, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.second_norm, self.second = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(F.silu(self.first_norm(x)))
        return self.short(x) + self.second(F.silu(self.second_norm(inner)))


class ConvUNet(nn.Module):
    """A U-Net of convolutions alone: each level has two blocks on the way down and two on the way up."""

    def __init__(self, channels: int, levels: int):
        super().__init__()
        widths = [channels << i for i in range(levels)]
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList([nn.Sequential(Convolutions(w, w), Convolutions(w, w)) for w in widths])
        self.shrink = nn.ModuleList([nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths)])
        self.grow = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths)])
        self.up = nn.ModuleList([nn.Sequential(Convolutions(2 * w, w), Convolutions(w, w)) for w in widths[:-1]])
        self.out = nn.Conv2d(channels, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, kept = self.stem(image), []
        for i, block in enumerate(self.down):
            x = block(x)
            if i < len(self.shrink):
                kept.append(x)
                x = self.shrink[i](x)
        for i in reversed(range(len(self.up))):
            x = self.up[i](torch.cat((self.grow[i](x), kept[i]), 1))
        return self.out(x)


def from_hub(kind: str, auto: str = "AutoModelForCausalLM") -> Callable[..., nn.Module]:
    """A model of transformers, from the sizes of its configuration."""
    return lambda **size: hugging_face(kind, auto, **size)()


# -- batches and losses ----------------------------------------------------------------------------------


def images(side: int) -> Callable[[int], Any]:
    return lambda rows: {"image": torch.randn(rows, 3, side, side), "labels": torch.arange(rows) % LABELS}


def image_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    return cross_entropy(model(batch["image"]), batch["labels"])


def pixel_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    wrong = (model(batch["image"]).float() - batch["image"].float()).pow(2)
    return on_torch.Loss(wrong.sum(), wrong.numel())


def masked(tokens: int) -> Callable[[int], Any]:
    def batch(rows: int) -> Any:
        ids = torch.randint(0, VOCABULARY, (rows, tokens))
        return {"ids": ids, "mask": torch.ones_like(ids), "labels": ids}

    return batch


def masked_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    return cross_entropy(model(input_ids=batch["ids"], attention_mask=batch["mask"]), batch["labels"])


def pairs(source: int, target: int) -> Callable[[int], Any]:
    def batch(rows: int) -> Any:
        given, wanted = torch.randint(0, VOCABULARY, (rows, source)), torch.randint(0, VOCABULARY, (rows, target))
        return {"source": given, "target": wanted, "labels": wanted}

    return batch


def pair_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    return cross_entropy(model(batch["source"], decoder_input_ids=batch["target"], use_cache=False), batch["labels"])


def speech(frames: int, target: int) -> Callable[[int], Any]:
    def batch(rows: int) -> Any:
        ids = torch.randint(0, VOCABULARY, (rows, target))
        return {"sound": torch.randn(rows, 80, frames), "target": ids, "labels": ids}

    return batch


def speech_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    out = model(input_features=batch["sound"], decoder_input_ids=batch["target"], use_cache=False)
    return cross_entropy(out, batch["labels"])


def captions(rows: int) -> Any:
    ids = torch.randint(0, VOCABULARY, (rows, 77))
    return {"ids": ids, "image": torch.randn(rows, 3, 224, 224), "labels": torch.arange(rows)}


def caption_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    out = model(input_ids=batch["ids"], pixel_values=batch["image"])
    flat = out.logits_per_image.float()
    return on_torch.Loss(F.cross_entropy(flat, batch["labels"], reduction="sum"), batch["labels"].numel())


# -- the configurations --------------------------------------------------------------------------------------

SMALL_LLAMA = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 1024}
SMALL_GPT = {"layers": 2, "dim": 64, "heads": 4, "vocab": 1024}
DECODER = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 8, "num_attention_heads": 16}
DECODER |= {"num_key_value_heads": 4, "vocab_size": 50_304, "use_cache": False}
ENCODER = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LESS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1024}
LESS_KEYS = LESS | {"num_key_value_heads": 2}
VIT = ENCODER | {"num_labels": LABELS}
LESS_IMAGES = {k: v for k, v in LESS.items() if k != "vocab_size"}
DISENTANGLED = {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True}
DISENTANGLED |= {"pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1, "position_biased_input": False}
DISENTANGLED |= {"type_vocab_size": 0, "vocab_size": 128_100}
SPARSE = DECODER | {"hidden_size": 768, "head_dim": 64, "num_attention_heads": 12, "num_key_value_heads": 4}
QWEN3 = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128}
QWEN3 |= {"num_key_value_heads": 8, "vocab_size": 151_936, "tie_word_embeddings": True, "use_cache": False}
QWEN3 |= {"max_position_embeddings": 40_960}
T5 = {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 12, "num_heads": 12, "vocab_size": 32_128}
LESS_T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 1024}
WHISPER = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
WHISPER |= {"encoder_attention_heads": 12, "decoder_attention_heads": 12, "use_cache": False}
LESS_WHISPER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
LESS_WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
LESS_PART = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP = {"text_config": {}, "vision_config": {}}
LESS_CLIP = {"text_config": LESS_PART, "vision_config": LESS_PART, "projection_dim": 64}
ON_32 = {"devices": 32}


def llama(why: str, name: str, rows: int, tokens: int, change: Size | None = None, **more: Any) -> UnseenCase:
    return UnseenCase(why, built_in, {"name": name, **(change or {})}, SMALL_LLAMA, rows, tokens, **more)


def decoder(why: str, kind: str, size: Size, rows: int, tokens: int, less: Size | None = None, **more: Any) -> UnseenCase:
    return UnseenCase(why, from_hub(kind), size, LESS_KEYS | (less or {}), rows, tokens, **more)


def other(why: str, kind: str, auto: str, sizes: tuple[Size, Size], rows: int, batch: Any, loss: Any, **more: Any) -> UnseenCase:
    return UnseenCase(why, from_hub(kind, auto), *sizes, rows, batch=batch, loss=loss, **more)


FULL: Size = {"remat": "full", "compile": True}
HYBRID: Size = {"strategy": "hybrid", "mesh": {"replicate": 4, "shard": 8}, "accumulate": 4}
CASES: dict[str, UnseenCase] = {
    "full-n32": llama("allocated +2.2%, reserved +9.5%", "llama3-8b", 2, 4096, mesh=ON_32, **FULL),
    "full-n32-1.5b": llama("the same, smaller", "llama-1.5b", 4, 4096, mesh=ON_32, **FULL),
    "full-n32-narrow": llama(
        "the same, peaks inside blocks", "llama3-8b", 4, 4096, {"layers": 8, "vocab": 8192}, mesh=ON_32, **FULL
    ),
    "hybrid-3b": llama("reserved -4.3%, time -7.7%", "llama3.2-3b", 2, 2048, **HYBRID),
    "hybrid-3b-compiled": llama("the same, compiled", "llama3.2-3b", 2, 2048, compile=True, **HYBRID),
    "conv-unet": UnseenCase(
        "time -22%", ConvUNet, {"channels": 128, "levels": 4}, {"channels": 8, "levels": 2}, 16, 1, images(128), pixel_loss
    ),
    "conv-unet-2gpu": UnseenCase(
        "the same on 2, larger", ConvUNet, {"channels": 192, "levels": 4}, {"channels": 8, "levels": 2}, 8, 1, images(256),
        pixel_loss, {"devices": 2},
    ),
    "mixtral-small": decoder(
        "time +18%", "mixtral", SPARSE | {"intermediate_size": 1536, "num_local_experts": 8, "num_experts_per_tok": 2}, 8, 1024,
        {"head_dim": 16, "num_local_experts": 4},
    ),
    "qwen3-moe-small": decoder(
        "time +18%", "qwen3_moe", SPARSE | {"moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 4}, 8, 1024,
        {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "vit-l": other(
        "time +17%", "vit", "AutoModelForImageClassification", (VIT, LESS_IMAGES), 64, images(224), image_loss
    ),
    "vit-l-compiled": other(
        "the same, compiled", "vit", "AutoModelForImageClassification", (VIT, LESS_IMAGES), 64, images(224), image_loss,
        compile=True,
    ),
    "deberta-large": other(
        "time +12%", "deberta-v2", "AutoModelForMaskedLM", (ENCODER | DISENTANGLED, LESS), 8, masked(512), masked_loss
    ),
    "attention-64k": llama("time +10%", "llama-1.5b", 1, 65_536, {"layers": 4, "sequence": 131_072}, remat="full"),
    "attention-128k": llama("time +10%", "llama-1.5b", 1, 131_072, {"layers": 2, "sequence": 131_072}, **FULL),
    "qwen3-1.7b": decoder("reserved +4.6%", "qwen3", QWEN3, 4, 4096, {"head_dim": 16}, compile=True),
    "qwen3-1.7b-1x4096": decoder("the same, fewer tokens", "qwen3", QWEN3, 1, 4096, {"head_dim": 16}, compile=True),
    "gpt2-medium": UnseenCase("another kind", built_in, {"name": "gpt2-medium"}, SMALL_GPT, 8, compile=True),
    "bert-large": other(
        "another kind", "bert", "AutoModelForMaskedLM", (ENCODER, LESS), 16, masked(512), masked_loss, compile=True
    ),
    "t5-base": other("another kind", "t5", "AutoModelForSeq2SeqLM", (T5, LESS_T5), 16, pairs(512, 128), pair_loss),
    "whisper-small": other(
        "another kind", "whisper", "AutoModelForSpeechSeq2Seq", (WHISPER, LESS_WHISPER), 8, speech(3000, 128), speech_loss
    ),
    "mamba": decoder(
        "another kind", "mamba", {"hidden_size": 1024, "num_hidden_layers": 4, "use_cache": False}, 2, 128,
        {"num_attention_heads": 4},
    ),
    "convnext-base": other(
        "another kind", "convnext", "AutoModelForImageClassification",
        ({"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024], "num_labels": LABELS},
         {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 32, 64]}), 64, images(224), image_loss,
    ),
    "clip": UnseenCase("another kind", from_hub("clip", "AutoModel"), CLIP, LESS_CLIP, 64, batch=captions, loss=caption_loss),
    "gemma3": decoder(
        "another kind", "gemma3_text", DECODER | {"head_dim": 128, "vocab_size": 262_144}, 2, 2048, {"head_dim": 16},
        compile=True,
    ),
    "phi3": decoder("another kind", "phi3", DECODER | {"pad_token_id": 0, "num_key_value_heads": 16}, 4, 2048, compile=True),
    "olmoe": decoder(
        "another kind", "olmoe", DECODER | {"intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 4}, 2, 2048,
        {"num_experts": 4, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
