"""The update of packed state and by one pass of a core: the same bits as torch's own kernels."""

import subprocess

import pytest
import torch

import fullshard as fs
from fullshard.on_torch.optimizers import cpu_adam
from fullshard.on_torch.optimizers.adam_update import apply_rule, rule_of
from fullshard.on_torch.optimizers.cpu_adam import OnePass
from fullshard.on_torch.optimizers.packed_masters import pack, unpack

COUNT, VECTORS = 4099, 4096  # torch rounds what is left over after its vectors in another order


def bits(count: int = 1 << 18) -> torch.Tensor:
    """Finite fp32 values of every size, a quarter of them in the middle between two bf16."""
    draw = torch.Generator().manual_seed(0)
    found = torch.randint(-(1 << 31), 1 << 31, (count,), generator=draw).to(torch.int32)
    found[::4] = (found[::4] & ~0xFFFF) | 0x8000
    values = found.view(torch.float32)
    return values[values.isfinite()]


def test_a_packed_master_comes_back_to_the_bit():
    master = bits()
    second = torch.rand(len(master))
    second[::3] = 0.0  # has a sign, too
    rounded, low, marked = master.bfloat16(), torch.empty(len(master), dtype=torch.int16), second.clone()
    pack(master, rounded, low, marked)
    assert bool(marked.signbit().any())
    found = torch.empty_like(master)
    unpack(rounded, low, marked, found)
    assert torch.equal(found.view(torch.int32), master.view(torch.int32))
    assert torch.equal(marked, second)
    assert not bool(marked.signbit().any())


def test_what_is_rounded_beyond_the_largest_comes_back():
    master = torch.tensor([3.4e38, -3.4e38, 0.0, -0.0, 1e-45, -1e-45])
    low, second = torch.empty(6, dtype=torch.int16), torch.zeros(6)
    assert master.bfloat16()[0].isinf()
    found = torch.empty_like(master)
    pack(master, master.bfloat16(), low, second)
    unpack(master.bfloat16(), low, second, found)
    assert torch.equal(found.view(torch.int32), master.view(torch.int32))


GROUP = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "nesterov": False}


def state_of(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(COUNT, generator=draw), *(torch.rand(COUNT, generator=draw) * s for s in (1e-2, 1e-4))]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("optimizer", "group"),
    [
        (fs.AdamW(), GROUP),
        (fs.Adam(), GROUP),
        (fs.AdamW(), GROUP | {"betas": (0.3, 0.95), "weight_decay": 0.0}),
        (fs.SGD(lr=0.1, momentum=0.9), GROUP),
    ],
    ids=["AdamW", "Adam", "low betas", "SGD"],
)
def test_one_pass_gives_the_bits_of_torchs_kernels(optimizer, group, dtype, rounds, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu_adam, "library", lambda: None)
    rule = rule_of(optimizer)
    own, other = state_of(1)[: 1 + rule.slots], state_of(1)[: 1 + rule.slots]
    rounded = torch.zeros(COUNT, dtype=torch.bfloat16) if rounds else None
    for step in (1, 2, 1000):
        gradient = (torch.randn(COUNT, generator=torch.Generator().manual_seed(step)) * 1e-2).to(dtype)
        update = OnePass(rule, own, gradient.clone(), rounded, [0.5, 0.7])
        for start, stop in ((0, 1024), (1024, COUNT)):
            update.run(start, stop, step, group)
        apply_rule(rule, other[0], gradient.float().mul_(0.5).mul_(0.7), other[1:], step, group)
    for a, b in zip(own, other, strict=True):
        assert torch.equal(a[:VECTORS], b[:VECTORS])
        torch.testing.assert_close(a, b, rtol=3e-7, atol=0)
    if rounded is not None:
        assert torch.equal(rounded, own[0].bfloat16())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("optimizer", "group"),
    [(fs.AdamW(), GROUP | {"weight_decay": 0.0}), (fs.AdamW(), GROUP), (fs.Adam(), GROUP)],
    ids=["no decay", "AdamW", "Adam"],
)
def test_one_pass_over_packed_state_gives_the_bits_of_one_over_whole_state(optimizer, group, dtype, compiled, monkeypatch):
    """A third of the masters lie between two roundings; without decay, those of them that get no gradient stay there."""
    if not compiled:
        monkeypatch.setattr(cpu_adam, "library", lambda: None)
    rule, wide = rule_of(optimizer), state_of(2)
    words = wide[0].view(torch.int32)
    words[::3] = (words[::3] & ~0xFFFF) | 0x8000
    wide[1][::6] = 0.0
    rounded, low, marked = wide[0].bfloat16(), torch.empty(COUNT, dtype=torch.int16), wide[2].clone()
    packed = [low, wide[1].clone(), marked]
    pack(wide[0], rounded, low, marked)
    for step in (1, 2):
        gradient = (torch.randn(COUNT, generator=torch.Generator().manual_seed(step)) * 1e-2).to(dtype)
        gradient[::6] = 0.0
        new = torch.zeros(COUNT, dtype=torch.bfloat16)
        for own, out in ((wide, new), (packed, rounded)):
            update = OnePass(rule, own, gradient.clone(), out, [0.5])
            for start, stop in ((0, 1024), (1024, COUNT)):
                update.run(start, stop, step, group)
        expected, second = torch.empty_like(low), wide[2].clone()
        pack(wide[0], new, expected, second)
        for a, b in ((rounded, new), (low, expected), (marked, second), (packed[1], wide[1])):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert bool(marked.signbit().any()) == (group["weight_decay"] == 0.0)


def test_without_a_compiler_or_a_place_to_put_it_torch_does_it(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for name, value in (("CC", "no-such-compiler"), ("XDG_CACHE_HOME", str(tmp_path / "file"))):
        with monkeypatch.context() as patched:
            patched.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            patched.setenv(name, value)
            assert cpu_adam.build().library is None
    assert not list((tmp_path / "cache").glob("**/*.so"))


def test_it_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if cpu_adam.build().library is None:
        pytest.skip("this machine has no C compiler")
    (made,) = (tmp_path / "fullshard").iterdir()
    monkeypatch.setattr(subprocess, "run", None)  # nobody calls a compiler again
    assert cpu_adam.build().library is not None
    assert [made] == list((tmp_path / "fullshard").iterdir())
