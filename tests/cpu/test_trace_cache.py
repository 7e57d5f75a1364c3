"""Descriptions of Hugging Face directories are kept on disk, and are the same as fresh ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fullshard as fs
from fullshard import on_torch
from fullshard.commands.common import describe_costs
from fullshard.model.costs import to_json
from fullshard.model.description_cache import cached_description, directory
from fullshard.on_torch.tracing import repeated_blocks, trace_costs

SIZE = {
    **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One for all tests, so that a process traces its model once."""
    made = tmp_path_factory.mktemp("llama")
    (made / "config.json").write_text(json.dumps(SIZE))
    return made


@pytest.fixture
def model(folder, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(folder)


def refuse() -> fs.Description:
    raise AssertionError("the model was traced again")


def entries() -> list[str]:
    return sorted(p.name for p in directory().iterdir())


def same(a: fs.Description, b: fs.Description) -> bool:
    traces = [to_json(d.costs.traces) for d in (a, b)]
    return a == b and traces[0] == traces[1] and (a.costs.shape, a.costs.vocabulary) == (b.costs.shape, b.costs.vocabulary)


def test_kept_equals_fresh_equals_unreduced(model, monkeypatch):
    fresh = describe_costs(model, 32, "bf16")
    kept = cached_description(model, sequence=4096, compute="bf16", make=refuse)  # holds for every sequence length
    assert same(fresh, kept)
    monkeypatch.setattr(repeated_blocks, "MIN_EQUAL", 1000)
    monkeypatch.setattr(trace_costs, "_CACHE", {})
    unreduced = on_torch.describe(on_torch.load_model(model), micro_batch=1, sequence=32, title=model)
    cluster = fs.Cluster.load("8xh100")
    plans = [fs.find_plan(d, cluster, sequence=256, global_batch=8) for d in (kept, unreduced)]
    assert plans[0].plan == plans[1].plan
    assert plans[0].estimate == plans[1].estimate


def test_another_config_or_dtype_is_another_entry(model, tmp_path):
    describe_costs(model, 32, "bf16")
    with pytest.raises(AssertionError, match="traced again"):
        cached_description(model, sequence=32, compute="fp32", make=refuse)
    (tmp_path / "config.json").write_text(json.dumps(SIZE | {"num_hidden_layers": 6}))
    with pytest.raises(AssertionError, match="traced again"):
        cached_description(str(tmp_path), sequence=32, compute="bf16", make=refuse)


def test_what_is_damaged_is_ignored_with_a_note(model, capsys):
    fresh = describe_costs(model, 32, "bf16")
    (entry,) = directory().iterdir()
    whole = entry.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], b"no gzip"):
        entry.write_bytes(damage)
        assert same(describe_costs(model, 32, "bf16"), fresh)
        assert "cannot be read" in capsys.readouterr().err
        assert entry.read_bytes() == whole


def test_a_directory_that_cannot_be_written_is_no_failure(model, tmp_path, capsys):
    (tmp_path / "cache").write_text("a file")
    assert describe_costs(model, 32, "bf16").costs is not None
    assert "the traced costs are not kept" in capsys.readouterr().err


def test_nothing_half_written_is_left(model):
    describe_costs(model, 32, "bf16")
    assert [name for name in entries() if not name.endswith(".json.gz")] == []


def test_a_kept_description_plans_without_torch(model):
    describe_costs(model, 32, "bf16")
    code = (
        "import sys\nfrom fullshard.commands.cli import app\n"
        f"app(['plan', {model!r}, '--cluster', '8xh100', '--sequence', '32'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert done.stderr == ""


def test_no_cache_traces_again(model):
    describe_costs(model, 32, "bf16")
    (entry,) = directory().iterdir()
    entry.write_bytes(b"damaged")
    describe_costs(model, 32, "bf16", fresh=True)
    assert entry.read_bytes() != b"damaged"
