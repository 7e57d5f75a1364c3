"""Import and export of Hugging Face, DCP, DeepSpeed and .pt files: same bytes, same logits, nothing executed."""

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.other_formats.export import export
from fullshard.checkpoint.other_formats.import_weights import import_weights
from fullshard.checkpoint.reader import open_checkpoint
from fullshard.checkpoint.verify import problems
from tests.cpu import checkpoint
from tests.cpu.test_finetune import save_model


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in directory.glob("*.safetensors") for n, t in load_file(f).items()}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).view(1, 12)).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_in_and_out_is_byte_for_byte_the_same(tmp_path, ranks, dtype):
    original = save_model(tmp_path / "model", dtype, tie_word_embeddings=dtype == torch.bfloat16)
    (tmp_path / "model/tokenizer.json").write_text("{}")
    ranks(2).run(checkpoint.from_hugging_face, str(tmp_path / "model"), str(tmp_path / "checkpoint_dir"))
    export(str(tmp_path / "checkpoint_dir"), tmp_path / "out", "hf")
    want, found = tensors(tmp_path / "model"), tensors(tmp_path / "out")
    assert want.keys() == found.keys()
    for name, tensor in want.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8)), name
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")))
    assert type(again) is type(original)


def test_large_exports_are_cut_into_files_with_an_index(tmp_path, ranks, monkeypatch):
    save_model(tmp_path / "model")
    ranks(2).run(checkpoint.from_hugging_face, str(tmp_path / "model"), str(tmp_path / "checkpoint_dir"))
    monkeypatch.setattr("fullshard.checkpoint.other_formats.export.FILE_BYTES", 100_000)
    export(str(tmp_path / "checkpoint_dir"), tmp_path / "out", "hf", dtype="bf16")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.bfloat16
    want = {n: t.to(torch.bfloat16) for n, t in tensors(tmp_path / "model").items()}
    assert all(torch.equal(want[n], t) for n, t in found.state_dict().items())


def test_adapters_as_peft_and_merged(tmp_path, ranks):
    save_model(tmp_path / "model")
    ranks(2).run(checkpoint.from_hugging_face, str(tmp_path / "model"), str(tmp_path / "checkpoint_dir"), lora=True, steps=3)
    export(str(tmp_path / "checkpoint_dir"), tmp_path / "peft", "peft")
    export(str(tmp_path / "checkpoint_dir"), tmp_path / "merged", "hf")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "peft")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-5, atol=1e-5)
    assert (logits(adapted) - logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))).abs().max() > 1e-3


def test_one_torch_file(tmp_path, ranks):
    save_model(tmp_path / "model")
    ranks(2).run(checkpoint.from_hugging_face, str(tmp_path / "model"), str(tmp_path / "checkpoint_dir"))
    export(str(tmp_path / "checkpoint_dir"), tmp_path / "model.pt", "torch")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    want = tensors(tmp_path / "model")
    assert found.keys() == want.keys()
    assert all(torch.equal(want[n], t) for n, t in found.items())
    with pytest.raises(FullshardError, match="exists already"):
        export(str(tmp_path / "checkpoint_dir"), tmp_path / "model.pt", "torch")
    import_weights(str(tmp_path / "model.pt"), Local(tmp_path / "back"))
    back = open_checkpoint(tmp_path / "back")
    assert all(np.array_equal(back.tensor(f"model.{n}"), t.numpy()) for n, t in want.items())


def test_presets_become_llamas_of_transformers(tmp_path, ranks):
    from fullshard.on_torch import initialize, load_model

    plain = load_model("llama-nano")
    initialize(plain, torch.device("cpu"), seed=0)
    torch.save(OrderedDict((n, p.detach()) for n, p in plain.named_parameters()), tmp_path / "m.pt")
    place = import_weights(str(tmp_path / "m.pt"), Local(tmp_path / "checkpoint_dir"))
    with pytest.raises(FullshardError, match="give --config DIR"):
        export(str(place), tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
    from fullshard.checkpoint.other_formats.export import export_hugging_face

    found = open_checkpoint(tmp_path / "checkpoint_dir")
    object.__setattr__(found.manifest, "recipe", {"model": {"name": "llama-nano"}})
    export_hugging_face(found, tmp_path / "out", None, None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(theirs), plain(torch.arange(12).view(1, 12)).detach(), rtol=1e-5, atol=1e-5)


# -- others' checkpoints ------------------------------------------------------------------------------------


def test_dcp_directories_and_files_of_each_rank(tmp_path, ranks):
    want = ranks(4).run(checkpoint.save_others, str(tmp_path))[0]
    (tmp_path / "files").mkdir()
    for rank in range(4):
        (tmp_path / f"model_rank_{rank}.pt").rename(tmp_path / f"files/model_rank_{rank}.pt")
    for kind in ("dcp", "bare", "files"):
        place = import_weights(str(tmp_path / kind), Local(tmp_path / f"from-{kind}"), step=1)
        assert problems(place) == []
        found = open_checkpoint(place.path)
        assert set(found.manifest.tensors) == {f"model.{n}" for n in want}
        for name, tensor in want.items():
            assert np.array_equal(found.tensor(f"model.{name}"), tensor.numpy()), name
    loaded = ranks(2).run(checkpoint.load_imported, str(tmp_path / "from-dcp"))[0]
    assert all(torch.equal(want[n], t) for n, t in loaded.items())
    (tmp_path / "files/model_rank_3.pt").unlink()
    with pytest.raises(FullshardError, match="hold only a part of it; give those of all ranks"):
        import_weights(str(tmp_path / "files"), Local(tmp_path / "part"))
    assert not (tmp_path / "part").exists()


def test_an_fsdp1_full_state_dict_with_wrappers_and_optimizer(tmp_path):
    weight = torch.randn(3, 4).t()  # not contiguous
    model = {"_fsdp_wrapped_module.layers.0._orig_mod.weight": weight, "module.b": torch.randn(2).to(torch.bfloat16)}
    torch.save({"model": model, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}, "epoch": 3}, tmp_path / "full.pt")
    place = import_weights(str(tmp_path / "full.pt"), Local(tmp_path / "out"))
    found = open_checkpoint(place.path)
    assert sorted(found.manifest.tensors) == ["model.b", "model.layers.0.weight"]
    assert np.array_equal(found.tensor("model.layers.0.weight"), weight.numpy())
    assert np.array_equal(found.tensor("model.b"), model["module.b"].float().numpy())


def deepspeed(path: Path, stage: int, ranks: int, params: dict[str, torch.Tensor]) -> None:
    """What DeepSpeed's engine writes (`_save_zero_checkpoint` and `_save_checkpoint`), for one parameter group."""
    path.mkdir()
    shapes = [OrderedDict((n, p.shape) for n, p in params.items())]
    model = {"module": {"buf": torch.arange(3.0)}, "buffer_names": ["buf"], "param_shapes": shapes, "ds_version": "0.19"}
    model |= {"shared_params": {"head.weight": "a.weight"}, "frozen_param_shapes": None, "frozen_param_fragments": None}
    if stage == 3:
        pad = lambda p: torch.cat([p.flatten(), torch.zeros(-p.numel() % ranks)])
        cut = [torch.cat([pad(p).chunk(ranks)[r] for p in params.values()]) for r in range(ranks)]
        key, groups = "fp32_flat_groups", [[c[:5], c[5:]] for c in cut]  # sub-groups of any sizes
    else:
        whole = torch.cat([p.flatten() for p in params.values()])
        whole = torch.cat([whole, torch.zeros(-whole.numel() % (2 * ranks))])
        key, groups = "single_partition_of_fp32_groups", [[c.clone()] for c in whole.chunk(ranks)]
    for rank in range(ranks):
        state = {"zero_stage": stage, "partition_count": ranks, key: groups[rank], "optimizer_state_dict": {}}
        torch.save({"optimizer_state_dict": state}, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(model, path / name)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(tmp_path, stage):
    params = {"a.weight": torch.randn(5, 3), "b": torch.randn(7), "c": torch.randn(2, 2)}
    deepspeed(tmp_path / "global_step9", stage, 4, params)
    (tmp_path / "latest").write_text("global_step9")
    found = open_checkpoint(import_weights(str(tmp_path), Local(tmp_path / "out"), step=9).path)
    assert set(found.manifest.tensors) == {"model.a.weight", "model.b", "model.c", "model.buf", "model.head.weight"}
    for name, p in params.items():
        assert np.array_equal(found.tensor(f"model.{name}"), p.numpy()), name
    assert np.array_equal(found.tensor("model.head.weight"), params["a.weight"].numpy())
    next((tmp_path / "global_step9").glob("*rank_3*optim*")).unlink()
    with pytest.raises(FullshardError, match=r"3 of 4 \*_optim_states.pt"):
        import_weights(str(tmp_path), Local(tmp_path / "out2"))


# -- nothing is executed ------------------------------------------------------------------------------------


class Evil:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def evil_zip(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", b"\0" * 8)


@pytest.mark.parametrize("kind", ["pt", "dcp", "deepspeed", "builtins", "storage", "span", "latest"])
def test_crafted_files_do_nothing_but_fail_with_a_sentence(tmp_path, kind):
    mark, where = tmp_path / "executed", tmp_path / "in"
    where.mkdir()
    match kind:
        case "pt":
            torch.save({"w": Evil(mark)}, where / "model.pt")
        case "dcp":
            (where / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
        case "deepspeed":
            torch.save({"optimizer_state_dict": Evil(mark)}, where / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        case "builtins":
            evil_zip(where / "model.pt", b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.")
        case "storage":  # a storage that does not exist
            evil_zip(where / "model.pt", pickle_of(storage="9"))
        case "span":  # reaches beyond its storage
            evil_zip(where / "model.pt", pickle_of(shape=1 << 40))
        case "latest":
            (where / "latest").write_text("../../etc")
    with pytest.raises(FullshardError) as caught:
        import_weights(str(where), Local(tmp_path / "out"))
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


def pickle_of(storage: str = "0", shape: int = 2) -> bytes:
    from fullshard.checkpoint.other_formats.torch_pickles import pickled_text, state_dict_pickle

    return state_dict_pickle([("w", "F32", (shape,))]).replace(pickled_text("0"), pickled_text(storage))


def test_a_dcp_file_outside_the_directory_is_not_read(tmp_path, ranks):
    ranks(2).run(checkpoint.save_others, str(tmp_path))
    metadata = (tmp_path / "bare/.metadata").read_bytes()
    (tmp_path / "bare/.metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../secrets/x"))
    with pytest.raises(FullshardError, match="which is not a file in it"):
        import_weights(str(tmp_path / "bare"), Local(tmp_path / "out"))


def test_export_takes_memory_for_one_tensor_not_for_the_model(tmp_path):
    """Runs in a separate process, to measure its peak memory."""
    import subprocess
    import sys

    code = f"""
import resource, numpy as np
from pathlib import Path
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.writer import TensorSource, write_checkpoint
from fullshard.checkpoint.other_formats.export import export
make = lambda i: (lambda: np.full(2_000_000, i, '<f4').tobytes())
sources = [TensorSource(f'model.w{{i}}', 'F32', (2_000_000,), make(i)) for i in range(40)]  # 320 MB
write_checkpoint(Local(Path({str(tmp_path)!r})), sources, step=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export({str(tmp_path)!r}, Path({str(tmp_path / "out.pt")!r}), 'torch')
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert int(done.stdout) * 1024 < 60e6, "more than a few tensors of 8 MB at a time"
