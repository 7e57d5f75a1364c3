"""Sizes of known models, and their descriptions without torch.

`describe` agrees with `on_torch.describe` of the built-in model of the same size, tensor by tensor; a test checks it.
"""

import json
import lzma
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError, nearest
from fullshard.model.costs import Costs, from_json
from fullshard.model.description import Description, Tensor, UnitDescription


@dataclass(frozen=True)
class LlamaSize:
    """RMSNorm, RoPE, SwiGLU, grouped-query attention; no biases."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int = 8192  # the longest the model was made for
    theta: float = 500_000.0
    eps: float = 1e-5
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def words(self, layers: int | None = None) -> str:
        """The shape in words; `layers` in place of its own."""
        heads = f"{self.heads} heads" + (f", {self.kv_heads} for keys and values" if self.kv_heads != self.heads else "")
        return f"{layers or self.layers} layers, dim {self.dim}, {heads}, ffn {self.ffn}, vocabulary {self.vocab}"


@dataclass(frozen=True)
class GPTSize:
    """LayerNorm, learned positions, GELU. `bias`: of attention; the feed-forward always has one."""

    dim: int
    layers: int
    heads: int
    vocab: int
    sequence: int = 1024
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True

    @property
    def ffn(self) -> int:
        return 4 * self.dim

    def words(self, layers: int | None = None) -> str:
        """The shape in words; `layers` in place of its own."""
        return f"{layers or self.layers} layers, dim {self.dim}, {self.heads} heads, ffn {self.ffn}, vocabulary {self.vocab}"


PRESETS: dict[str, LlamaSize | GPTSize] = {
    "llama-nano": LlamaSize(16, 2, 4, 2, 32, 64, 128),  # 7 thousand parameters: for tests
    "llama-bytes": LlamaSize(192, 4, 6, 2, 512, 256, 1024, theta=10_000.0),  # byte-level: the demo
    "llama-125m": LlamaSize(768, 12, 12, 4, 2048, 32_000, 2048),
    "llama-1.5b": LlamaSize(2048, 16, 32, 8, 8192, 128_256),
    "llama-3.6b": LlamaSize(3072, 28, 24, 8, 8192, 128_256),
    "llama-33b": LlamaSize(6656, 60, 52, 52, 17_920, 32_000, 2048, theta=10_000.0, eps=1e-6),
    "llama-65b": LlamaSize(8192, 80, 64, 64, 22_016, 32_000, 2048, theta=10_000.0),
    "llama2-7b": LlamaSize(4096, 32, 32, 32, 11_008, 32_000, 4096, theta=10_000.0),
    "llama2-13b": LlamaSize(5120, 40, 40, 40, 13_824, 32_000, 4096, theta=10_000.0),
    "llama2-70b": LlamaSize(8192, 80, 64, 8, 28_672, 32_000, 4096, theta=10_000.0),
    "llama3-8b": LlamaSize(4096, 32, 32, 8, 14_336, 128_256),
    "llama3-70b": LlamaSize(8192, 80, 64, 8, 28_672, 128_256),
    "llama3-405b": LlamaSize(16_384, 126, 128, 8, 53_248, 128_256),
    "llama3.2-1b": LlamaSize(2048, 16, 32, 8, 8192, 128_256, tied=True),
    "llama3.2-3b": LlamaSize(3072, 28, 24, 8, 8192, 128_256, tied=True),
    "gpt-nano": GPTSize(16, 2, 2, 64, 64),
    "gpt-33m": GPTSize(512, 10, 8, 1024, 64, dropout=0.1, bias=False, tied=False),  # a small example
    "gpt2": GPTSize(768, 12, 12, 50_257),
    "gpt2-medium": GPTSize(1024, 24, 16, 50_257),
    "gpt2-large": GPTSize(1280, 36, 20, 50_257),
    "gpt2-xl": GPTSize(1600, 48, 25, 50_257),
    "gpt3-175b": GPTSize(12_288, 96, 96, 50_257, 2048),  # attention is dense in every layer; published: in every other
}


SHIPPED = Path(__file__).parent / "presets.json.xz"  # their costs; written by `benchmarks.write_presets`


def preset(name: str) -> LlamaSize | GPTSize:
    """The size called `name`."""
    if name not in PRESETS:
        raise FullshardError(f"unknown model {name!r}; the presets are {', '.join(PRESETS)}{nearest(name, list(PRESETS))}")
    return PRESETS[name]


def describe(name: str) -> Description:
    """The description of a preset: tensors from its size, and the costs that are shipped with the package."""
    size = preset(name)
    return replace(_describe(name, size), costs=_costs(name, size.vocab))


@lru_cache
def parameters(name: str) -> int:
    """The number of parameters of a preset."""
    return _describe(name, preset(name)).numel


@lru_cache
def _shipped() -> dict[str, Any]:
    return json.loads(lzma.decompress(SHIPPED.read_bytes()))


@lru_cache
def _costs(name: str, vocabulary: int) -> Costs | None:
    rows = _shipped() if SHIPPED.exists() else {}
    return Costs(from_json(rows[name]), vocabulary=vocabulary) if name in rows else None


def _describe(name: str, size: LlamaSize | GPTSize) -> Description:
    embed, blocks, head = _llama_units(size) if isinstance(size, LlamaSize) else _gpt_units(size)
    if size.tied:
        table, *rest = embed.parameters
        tied = Tensor(table.name, table.shape, ties=(head.parameters[-1].name,))
        embed = UnitDescription("embed", "embed", embed.modules + head.modules, (tied, *rest, *head.parameters[:-1]))
        return Description(name, (embed, *blocks))
    return Description(name, (embed, *blocks, head))


Units = tuple[UnitDescription, list[UnitDescription], UnitDescription]


def _llama_units(s: LlamaSize) -> Units:
    kv = s.kv_heads * s.head_dim
    shapes = {
        "self_attn.q_proj": (s.dim, s.dim),
        "self_attn.k_proj": (kv, s.dim),
        "self_attn.v_proj": (kv, s.dim),
        "self_attn.o_proj": (s.dim, s.dim),
        "mlp.gate_proj": (s.ffn, s.dim),
        "mlp.up_proj": (s.ffn, s.dim),
        "mlp.down_proj": (s.dim, s.ffn),
        "input_layernorm": (s.dim,),
        "post_attention_layernorm": (s.dim,),
    }
    blocks = [_block(f"model.layers.{i}", {f"{k}.weight": v for k, v in shapes.items()}) for i in range(s.layers)]
    embed = UnitDescription("embed", "embed", ("model.embed_tokens",), (Tensor("model.embed_tokens.weight", (s.vocab, s.dim)),))
    last = (Tensor("model.norm.weight", (s.dim,)), Tensor("lm_head.weight", (s.vocab, s.dim), linear=True))
    return embed, blocks, UnitDescription("head", "head", ("model.norm", "lm_head"), last)


def _gpt_units(s: GPTSize) -> Units:
    shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": (s.dim,), "attention_norm.bias": (s.dim,)}
    for name in ("wq", "wk", "wv", "wo"):
        shapes[f"attention.{name}.weight"] = (s.dim, s.dim)
        if s.bias:
            shapes[f"attention.{name}.bias"] = (s.dim,)
    shapes |= {"ffn_norm.weight": (s.dim,), "ffn_norm.bias": (s.dim,)}
    shapes |= {"feed_forward.w1.weight": (s.ffn, s.dim), "feed_forward.w1.bias": (s.ffn,)}
    shapes |= {"feed_forward.w2.weight": (s.dim, s.ffn), "feed_forward.w2.bias": (s.dim,)}
    blocks = [_block(f"layers.{i}", shapes) for i in range(s.layers)]
    tables = (Tensor("tok_embeddings.weight", (s.vocab, s.dim)), Tensor("pos_embeddings.weight", (s.sequence, s.dim)))
    embed = UnitDescription("embed", "embed", ("tok_embeddings", "pos_embeddings"), tables)
    last = (
        Tensor("norm.weight", (s.dim,)),
        Tensor("norm.bias", (s.dim,)),
        Tensor("output.weight", (s.vocab, s.dim), linear=True),
    )
    return embed, blocks, UnitDescription("head", "head", ("norm", "output"), last)


def _block(path: str, shapes: dict[str, tuple[int, ...]]) -> UnitDescription:
    tensors = tuple(Tensor(f"{path}.{name}", shape, linear=len(shape) == 2) for name, shape in shapes.items())
    return UnitDescription(path, "block", (path,), tensors)
