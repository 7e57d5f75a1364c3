"""The planner's bytes for models that it was not made with: odd blocks, and families of Hugging Face's.

The count is the one of `live`: every storage of the real engine, from birth to death.
"""

import pytest
import torch
from torch import Tensor, nn

import fullshard as fs
from fullshard import FullshardError, on_torch
from fullshard.model.costs import ANY_ROWS
from fullshard.planner.memory import peak_memory
from fullshard.planner.step.schedule import schedule
from tests.cpu import live
from tests.cpu.test_planner import BF16, LOSSES, _fresh, _peak, _without_cuda  # noqa: F401 (a fixture)

ROWS, TOKENS, VOCAB = 2, 32, 128


class Odd(nn.Module):
    """A block that returns its attention beside its activations, with a mask for so many positions and no more."""

    def __init__(self, dim: int, mask: torch.dtype):
        super().__init__()
        self.q, self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.register_buffer("mask", torch.zeros(TOKENS, TOKENS, dtype=mask))

    def reset_parameters(self) -> None:
        self.mask.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = (self.q(x) @ x.transpose(1, 2)).softmax(-1)
        seen = seen @ self.mask.expand_as(seen) if self.mask.dtype.is_floating_point else seen + self.mask
        return x + self.down(self.up(seen @ x).relu()), seen


class Model(nn.Module):
    def __init__(self, mask: torch.dtype = torch.int64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList([Odd(16, mask) for _ in range(5)])
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            both = layer(x)
            x = both[0]
        return self.head(x)


def off(build, remat: str, loss: str, monkeypatch) -> int:
    """Bytes by which the planner's peak is more than the engine's."""
    found = on_torch.describe(build(), micro_batch=ROWS, sequence=TOKENS)
    plan = fs.zero3(found, devices=4, precision=BF16, batch=fs.Batch(ROWS, TOKENS), remat=remat)
    measured = live.run_step(build(), plan, LOSSES[loss], VOCAB)
    _without_cuda(monkeypatch)
    return _peak(peak_memory.steady(plan, found, schedule(plan, found, loss=loss), slots=2)) - measured.peak


@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_a_block_returns_beside_its_activations_is_counted(remat, monkeypatch):
    def build() -> nn.Module:
        with torch.device("meta"):
            return Model()

    assert abs(off(build, remat, "plain", monkeypatch)) <= 64


def test_a_model_that_takes_no_longer_batch_is_traced_at_its_own():
    with torch.device("meta"):
        found = on_torch.describe(Model(), micro_batch=ROWS, sequence=TOKENS)
    assert found.costs is not None
    assert found.costs.shape == (ANY_ROWS, TOKENS)


def test_a_model_that_does_not_run_in_the_dtype_gets_a_sentence():
    """FSDP casts parameters, and leaves buffers as they are."""
    with torch.device("meta"):
        model = Model(torch.float32)
    with pytest.raises(FullshardError, match=r"Model does not run at 2 × 32 with parameters in bf16: expected "):
        on_torch.describe(model, micro_batch=ROWS, sequence=TOKENS)
    assert on_torch.describe(model, micro_batch=ROWS, sequence=TOKENS, compute="fp32").costs is not None


COMMON = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 64, "use_cache": False},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
SHORT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "rotary_dim": 8, "vocab_size": VOCAB}
# Name to configuration, and by how many bytes the count may be off: LayerNorm's means and scales are kept in bf16 on a CPU.
FAMILIES = {
    "gemma3_text": (COMMON, 64),
    "gpt_oss": (COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}, 64),
    "qwen3_moe": (COMMON | EXPERTS | {"num_experts": 4}, 64),
    "deepseek_v3": (
        {k: v for k, v in COMMON.items() if k != "head_dim"}
        | EXPERTS
        | LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        64,
    ),
    "gptj": (SHORT | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}, 4096),
    "bloom": ({"hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": VOCAB}, 4096),
}


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_counted(name, remat, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings, few = FAMILIES[name]

    def build() -> nn.Module:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).train()

    assert abs(off(build, remat, "chunked", monkeypatch)) <= few
