"""Mixtures of experts: transformers' directories in, the same directories out, each rank reading its own bytes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fullshard.checkpoint.other_formats.export import export
from tests.cpu import mixtures


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in directory.glob("*.safetensors") for n, t in load_file(f).items()}


def transformers_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(mixtures.ids()[:, :-1], use_cache=False).logits


def loaded(directory: Path) -> torch.nn.Module:
    """By transformers, with every tensor accounted for."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", mixtures.FAMILIES)
def test_from_a_directory_through_training_to_a_directory(ranks, tmp_path, family):
    original = mixtures.save(family, tmp_path / "model")
    found = ranks(2).run(mixtures.train, str(tmp_path / "model"), str(tmp_path / "checkpoints"))[0]
    torch.testing.assert_close(found["before"], transformers_logits(original), atol=2e-6, rtol=1e-5)
    export(str(tmp_path / "checkpoints"), tmp_path / "out", "hf")
    want = {n: t.shape for n, t in tensors(tmp_path / "model").items()}
    assert {n: t.shape for n, t in tensors(tmp_path / "out").items()} == want
    again = transformers_logits(loaded(tmp_path / "out"))
    torch.testing.assert_close(found["after"], again, atol=2e-6, rtol=1e-5)
    assert (again - transformers_logits(original)).abs().max() > 1e-2  # it was trained


def test_untrained_bytes_come_back_as_they_were(ranks, tmp_path):
    mixtures.save("mixtral", tmp_path / "model")
    names = tensors(tmp_path / "model")
    assert any(".experts.3.w2.weight" in n for n in names)
    ranks(2).run(mixtures.train, str(tmp_path / "model"), str(tmp_path / "checkpoints"), lora=True)
    export(str(tmp_path / "checkpoints"), tmp_path / "out", "hf")
    found = tensors(tmp_path / "out")
    assert found.keys() == names.keys()
    changed = {n for n in names if not torch.equal(names[n], found[n])}
    assert changed == {n for n in names if "q_proj" in n}  # the merged adapters
    export(str(tmp_path / "checkpoints"), tmp_path / "half", "hf", dtype="bf16")
    for name, tensor in tensors(tmp_path / "half").items():
        assert torch.equal(tensor, found[name].bfloat16()), name


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_each_rank_reads_its_own_bytes_only(ranks, tmp_path, dim):
    """Dim 0 cuts between experts, dim 1 between gate and up, dim 2 inside the rows of every expert."""
    want = mixtures.save("mixtral", tmp_path).state_dict()
    counts = ranks(2).run(mixtures.counted, str(tmp_path), dim)
    for found in counts:
        assert found["read"] == found["mine"]
        for name, p in found["whole"].items():
            assert torch.equal(p, want[name]), name
    assert sum(found["read"] for found in counts) == sum(t.numel() * 4 for t in tensors(tmp_path).values())


def spoil(directory: Path, change) -> None:
    found = tensors(directory)
    change(found)
    save_file({n: t.contiguous() for n, t in found.items()}, directory / "model.safetensors", {"format": "pt"})


W1, W2, W3 = (f"model.layers.1.block_sparse_moe.experts.2.w{i}.weight" for i in (1, 2, 3))
LAST = W1.replace("experts.2", "experts.3")
BAD = {
    "no expert 2": (lambda t: t.pop(W2), "there is no tensor model.layers.1.block_sparse_moe.experts.2.w2.weight before"),
    "no last up": (
        lambda t: t.pop(LAST),
        "there are 3 tensors model.layers.1.block_sparse_moe.experts.*.w1.weight and 4 tensors",
    ),
    "no ups at all": (
        lambda t: [t.pop(n) for n in list(t) if n.endswith("w3.weight")],
        "there is no tensor .experts.*.w3.weight for model.layers.0.mlp.experts.gate_up_proj",
    ),
    "another shape": (lambda t: t.update({W2: torch.zeros(16, 23)}), "experts.2.w2.weight is [16, 23], but"),
    "a fifth expert": (
        lambda t: t.update({n.replace("experts.3", "experts.4"): v.clone() for n, v in list(t.items()) if "experts.3" in n}),
        "is [5, 48, 16], the model's is [4, 48, 16]: it holds another model",
    ),
    "whole numbers": (lambda t: t.update({W1: torch.zeros(24, 16, dtype=torch.int32)}), f"{W1} is I32; save it in bf16"),
    "something else": (lambda t: t.update({"model.adapter": torch.zeros(2)}), "has model.adapter, which this model lacks"),
}


@pytest.mark.parametrize("case", BAD)
def test_experts_that_do_not_make_the_model_are_refused(tmp_path, case):
    mixtures.save("mixtral", tmp_path)
    change, says = BAD[case]
    spoil(tmp_path, change)
    said = mixtures.refusal(str(tmp_path))
    assert says in said
    assert "\n" not in said
    assert str(tmp_path) in said
