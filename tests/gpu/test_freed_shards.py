"""Parameters in host memory, read from the model on a GPU. Run by hand: python -m pytest tests/gpu/test_freed_shards.py"""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAME = "model.layers.0.mlp.up_proj.weight"


def trained(home):
    import fullshard as fs
    from fullshard import on_torch

    model = on_torch.load_model("llama-bytes")
    plan = fs.zero3(on_torch.describe(model), devices=1, batch=fs.Batch(2, 64), precision=fs.Precision("bf16"))
    for unit in plan.units:
        plan = plan.change(unit.name, home=home)
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), seed=0, device="cuda", cpu_share=None if home == fs.Home() else 0.0)
    losses = [step(state, i) for i in range(3)]
    return state, losses


def step(state, i):
    from fullshard import on_torch

    ids = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(i)).cuda()
    return on_torch.train_step(state, [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}], clip=1.0).loss.item()


def test_reading_a_freed_parameter_is_a_sentence_and_leaves_the_device_usable():
    """An illegal address would end every later call on the device."""
    import fullshard as fs
    from fullshard.base.errors import FullshardError

    (state, losses), (plain, expected) = trained(fs.Home("host", "host")), trained(fs.Home())
    p = state.model.get_parameter(NAME)
    for read in (lambda: p.sum().item(), lambda: str(p), lambda: p.to_local()[0].float().cpu(), lambda: p.full_tensor().clone()):
        with pytest.raises(FullshardError, match=r"state\.values"):
            read()
    torch.cuda.synchronize()
    assert (p.device.type, p.shape) == ("cuda", plain.model.get_parameter(NAME).shape)
    with state.values() as values, plain.values() as own:
        assert torch.allclose(values[NAME].to_local().cuda().float(), own[NAME].to_local().float(), atol=1e-4)
    assert [*losses, step(state, 3)] == pytest.approx([*expected, step(plain, 3)], abs=1e-2)
