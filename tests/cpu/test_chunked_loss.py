"""The chunked loss against `F.cross_entropy`: value, gradients, and how much is alive at once."""

import pytest
import torch
import torch.nn.functional as F

from fullshard.on_torch import chunked_cross_entropy
from fullshard.on_torch.loss.chunked_loss import BYTES_PER_LOGIT
from tests.cpu import engine, parity
from tests.cpu.parity import Case

TOKENS, DIM, VOCAB = 37, 24, 301


def inputs(*, bias: bool, dtype: torch.dtype = torch.float32):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=draw).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, DIM, generator=draw) / DIM**0.5).to(dtype).requires_grad_()
    shift = torch.randn(VOCAB, generator=draw).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    labels[::5] = -100
    return hidden, weight, shift, labels


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_a_chunk", [1, 8, 37, 1000])
def test_value_and_gradients(bias, tokens_a_chunk):
    hidden, weight, shift, labels = inputs(bias=bias)
    leaves = [t for t in (hidden, weight, shift) if t is not None]
    plain = F.cross_entropy(F.linear(hidden, weight, shift), labels, ignore_index=-100, reduction="sum") / 29
    want = torch.autograd.grad(plain, leaves)
    chunked = chunked_cross_entropy(hidden, weight, labels, shift, budget=BYTES_PER_LOGIT * VOCAB * tokens_a_chunk) / 29
    found = torch.autograd.grad(chunked, leaves)
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-6)
    for a, b in zip(found, want, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-6


def test_bf16_gradients_are_as_close_to_fp32_as_the_plain_loss_is():
    exact = inputs(bias=False)
    reference = torch.autograd.grad(F.cross_entropy(F.linear(*exact[:2]), exact[3], reduction="sum") / 29, exact[:2])
    errors = {}
    for name in ("plain", "chunked"):
        hidden, weight, _, labels = inputs(bias=False, dtype=torch.bfloat16)
        if name == "plain":
            loss = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum") / 29
        else:
            loss = chunked_cross_entropy(hidden, weight, labels, budget=8 * VOCAB * BYTES_PER_LOGIT) / 29
        found = torch.autograd.grad(loss, (hidden, weight))
        errors[name] = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, reference, strict=True))
    assert errors["chunked"] <= 1.25 * errors["plain"], errors  # each chunk's share is rounded once more


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that any operator made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize(("tokens", "vocab"), [(64, 500), (256, 500), (64, 2000), (256, 2000)])
def test_what_is_alive_at_once_does_not_grow_with_tokens_times_vocabulary(tokens, vocab):
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    budget = BYTES_PER_LOGIT * 16_000
    with Sizes() as chunked:
        chunked_cross_entropy(hidden, weight, labels, budget=budget).backward()
    with Sizes() as plain:
        F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum").backward()
    assert plain.largest == tokens * vocab
    assert chunked.largest <= max(16_000, 8 * max(tokens, vocab))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, Case("zero3", remat="full", accumulate=4, loss="chunked", clip=0.1)),
        (2, Case("zero2", kind="tied", loss="chunked")),
        (2, Case("ddp", kind="lora", loss="chunked")),
        (4, Case("hybrid", {"replicate": 2, "shard": 2}, kind="tied", loss="chunked")),
        (2, Case("zero3", {"tensor": 2}, loss="chunked", clip=0.1)),  # a head that is split by vocabulary
        (4, Case("zero3", {"tensor": 2}, remat="full", accumulate=2, kind="tied", loss="chunked")),
    ],
    ids=str,
)
def test_sharded_training_with_the_chunked_loss_equals_unsharded_with_the_plain_one(ranks, world, case):
    for found in ranks(world).run(parity.errors, case):
        assert found["loss"] <= 1e-6, found
        assert found["norm"] <= 1e-6, found
        assert found["param"] <= 3e-6, found  # the chunks are summed in another order than the oracle's one product


def test_a_model_that_caps_its_logits_is_refused(ranks):
    for found in ranks(2).run(engine.capped_logits):
        assert "the model changes the logits after its head" in found


def test_hugging_face_models_take_it(ranks):
    for chunked, plain in ranks(2).run(engine.chunked_hugging_face):
        assert chunked == pytest.approx(plain, rel=1e-5)
