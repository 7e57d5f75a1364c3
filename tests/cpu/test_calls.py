"""What remat makes the host do: counts of a trace against what torch's own checkpointing was really asked to do."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from fullshard import on_torch
from fullshard.on_torch.measuring import host_time
from fullshard.on_torch.parallelize.remat import apply_remat
from fullshard.on_torch.tracing.trace import trace
from fullshard.on_torch.tracing.trace_batch import token_batch

CPU = torch.device("cpu")


class Layer(nn.Module):
    """No kernel in it is another one on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(32, 8), nn.ModuleList(Layer() for _ in range(3)), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def counted(patch: pytest.MonkeyPatch, owner: type, method: str, calls: Counter[str], name: str) -> None:
    stock = getattr(owner, method)

    def instead(*args, **kwargs):
        calls[name] += 1
        return stock(*args, **kwargs)

    patch.setattr(owner, method, instead)


def really(remat: str) -> Counter[str]:
    """Counted at torch's own: its dispatch modes, the frame of each region, the holder of each saved tensor."""
    calls: Counter[str] = Counter()
    model = Model()
    for layer in model.layers:
        apply_remat(layer, remat)
    with pytest.MonkeyPatch.context() as patch:
        for mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
            counted(patch, mode, "__torch_dispatch__", calls, "dispatched")
        counted(patch, checkpoint._CheckpointFrame, "__init__", calls, "regions")
        holder = checkpoint._Holder
        patch.setattr(checkpoint, "_Holder", lambda: (calls.update(saved=1), holder())[1])
        model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    return calls


@pytest.mark.parametrize("remat", ["full", "selective"])
def test_a_trace_counts_what_torch_really_does(remat):
    with torch.device("meta"):
        model = Model()
    description = on_torch.describe(model, names=("layers.*",))
    options = {"compute": torch.float32, "remat": remat, "counting": True}
    found = trace(model, description, on_torch.summed_loss, batch=token_batch(2, 4), **options)
    total = sum((s.calls for s in found.sections), Counter())
    real = really(remat)
    assert real["regions"] == 3
    assert total["dispatched"] == real["dispatched"]
    assert (real["dispatched"] > 0) == (remat == "selective")
    assert (total["regions"], total["saved"]) == (2 * real["regions"], 2 * real["saved"])  # forward, and again
    assert not any("_fullshard_contexts" in m.__dict__ for m in model.modules())


def test_the_times_of_a_host_are_told_apart():
    found = host_time.time_host(CPU)
    assert set(found) == {"launch", "checkpointed", "saved", "dispatched"}
    assert all(0 < seconds < 0.1 for seconds in found.values())


def test_the_times_of_remat_come_out_of_times_that_were_made_of_them():
    """A forward of 7, a step of 20; regions of 3, tensors of 2, operations of 5: six of each kind by hand."""
    full, selective, empty = Counter(regions=2, saved=6), Counter(regions=2, saved=6, dispatched=4), Counter(regions=2, saved=2)
    times = {"none": 20.0, "forward": 7.0, "full": 20.0 + 7 + 2 * 3 + 6 * 2, "selective": 20.0 + 7 + 2 * 3 + 6 * 2 + 4 * 5}
    times |= {"empty none": 4.0, "empty forward": 1.0, "empty full": 4.0 + 1 + 2 * 3 + 2 * 2}
    assert host_time._solve(times, full, selective, empty) == {"checkpointed": 3.0, "saved": 2.0, "dispatched": 5.0}
