"""The kernels that update offloaded state are reported with the reason, and never guessed from an error."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch

from fullshard import FullshardError
from fullshard.on_torch.offload.updates import gpu_lane
from fullshard.on_torch.optimizers import cpu_adam
from fullshard.on_torch.optimizers.adam_update import Rule
from fullshard.plan.plan import Home
from tests.cpu import homes
from tests.cpu.homes import Case

ADAMW = Rule("adamw", ("exp_avg", "exp_avg_sq"))
CUDA = torch.device("cuda", 0)


def kernels(case: Case, compiler: str | None = None, cache: str = "") -> dict[str, str]:
    """On a rank: what a state says, with another compiler if one is named."""
    import os

    before = dict(os.environ)
    if compiler is not None:
        os.environ |= {"CC": compiler, "XDG_CACHE_HOME": cache}
        cpu_adam.built.cache_clear()
    try:
        return homes.make(case, ".").kernels
    finally:
        os.environ.clear()
        os.environ |= before
        cpu_adam.built.cache_clear()


def test_a_state_says_which_kernels_update_it(ranks, tmp_path):
    host = Case((Home(optimizer="host"),), compute="bf16")
    found = ranks(1).run(kernels, host)[0]
    assert found["cpu_update"] == "compiled (cpu_adam.c)" or found["cpu_update"].startswith("torch: ")
    assert found["gpu_update"] == "torch (Triton's kernel is for packed state on a GPU)"
    missing = ranks(1).run(kernels, host, "no-such-compiler", str(tmp_path))[0]
    assert missing["cpu_update"] == "torch: there is no C compiler (no-such-compiler)"
    refusing = ranks(1).run(kernels, host, "false", str(tmp_path))[0]
    assert refusing["cpu_update"] == "torch: false cannot compile cpu_adam.c: no message"
    assert ranks(1).run(kernels, Case((Home(optimizer="host"),)))[0]["cpu_update"] == "torch (cpu_adam.c is not for float32)"
    assert ranks(1).run(kernels, Case())[0] == {}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("no module named triton"), "Triton cannot be imported"),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), "finds no compiler"),
        (subprocess.CalledProcessError(1, "gcc"), "finds no compiler"),
        (None, "differs from torch's"),
    ],
)
def test_without_triton_torchs_kernels_do_it_and_say_why(monkeypatch, error, said):
    plant(monkeypatch, error)
    assert gpu_lane.find_kernel.__wrapped__(CUDA, ADAMW)[0] is None
    assert said in gpu_lane.find_kernel.__wrapped__(CUDA, ADAMW)[1]


@pytest.mark.parametrize("error", [RuntimeError("Triton Error [CUDA]: invalid argument"), KeyError("float32"), AssertionError()])
def test_a_fault_of_the_kernel_is_no_missing_compiler(monkeypatch, error):
    plant(monkeypatch, error)
    with pytest.raises(FullshardError, match="fails on this GPU") as caught:
        gpu_lane.find_kernel.__wrapped__(CUDA, ADAMW)
    assert "\n" not in str(caught.value)


def plant(monkeypatch, error: Exception | None) -> None:
    """A kernel whose trial ends so: without a GPU there is no other."""
    import fullshard.on_torch.optimizers as package

    module = ModuleType("fullshard.on_torch.optimizers.triton_adam")

    def agrees(rule: Rule, device: torch.device) -> bool:
        if error is not None:
            raise error
        return False

    module.agrees = agrees
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package, "triton_adam", module, raising=False)
