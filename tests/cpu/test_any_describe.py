"""`describe(model, example=batch, loss=function)`: models that are no language models, held against the real engine.

The count of bytes is the one of `live`: every storage of the engine, from birth to death.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard as fs
from fullshard import FullshardError, on_torch
from fullshard.model.costs import evaluate
from fullshard.planner.memory import peak_memory
from fullshard.planner.step.schedule import schedule
from fullshard.planner.step.unit_sizes import unit_sizes
from fullshard.planner.time.timeline import timeline
from tests.cpu import live
from tests.cpu.test_planner import BF16, _fresh, _peak, _without_cuda  # noqa: F401 (a fixture)

ROWS, CLASSES = 3, 10


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.norm(self.first(x))))


class ConvNet(nn.Module):
    """Convolutions, pooling and a linear head; six equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2)
        self.blocks = nn.ModuleList([Residual(16) for _ in range(6)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return self.head(F.avg_pool2d(x, 2).mean((2, 3)))


class UNet(nn.Module):
    """Blocks of different widths, with skip connections and interpolation between them, and cross-attention to a text."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([Residual(8), Residual(16)])
        self.widen = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(12, 16)
        self.narrow = nn.ConvTranspose2d(16, 8, 3, padding=1)
        self.up = nn.ModuleList([Residual(8), Residual(8)])
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        high = self.down[0](self.stem(image))
        low = self.down[1](self.widen(high))
        seen = self.key(text).unsqueeze(1)
        flat = self.query(low.flatten(2).transpose(1, 2)).unsqueeze(1)
        low = low + F.scaled_dot_product_attention(flat, seen, seen).squeeze(1).transpose(1, 2).reshape(low.shape)
        x = self.narrow(F.interpolate(low, scale_factor=2.0)) + high
        for block in self.up:
            x = block(x)
        return self.out(x)


class Recurrent(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        return torch.stack([state := self.cell(part, state) for part in x.unbind(1)], 1)


class Tagger(nn.Module):
    """A recurrent network that tags tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([Recurrent(16) for _ in range(2)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(**size, image_size=16, patch_size=4, num_labels=CLASSES))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    size = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**size, **quiet))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 4, "num_heads": 4, "vocab_size": 50, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**size, dropout_rate=0.0))


def rows_loss(model: nn.Module, batch) -> on_torch.Loss:
    out = model(batch["image"])
    logits = out if isinstance(out, Tensor) else out.logits
    return on_torch.Loss(F.cross_entropy(logits.float(), batch["label"], reduction="sum"), batch["label"].numel())


def pixel_loss(model: nn.Module, batch) -> on_torch.Loss:
    image, text, noise = batch
    return on_torch.Loss((model(image, text) - noise).float().pow(2).sum(), noise.numel())


def tag_loss(model: nn.Module, batch) -> on_torch.Loss:
    logits = model(batch["ids"]).flatten(0, 1).float()
    return on_torch.Loss(F.cross_entropy(logits, batch["tags"].flatten(), reduction="sum"), batch["tags"].numel())


def masked_loss(model: nn.Module, batch) -> on_torch.Loss:
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits.flatten(0, 1).float()
    return on_torch.Loss(F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum"), batch["labels"].numel())


def pair_loss(model: nn.Module, batch) -> on_torch.Loss:
    logits = model(input_ids=batch["source"], decoder_input_ids=batch["target"], use_cache=False).logits.flatten(0, 1).float()
    return on_torch.Loss(F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum"), batch["labels"].numel())


def images(rows: int, side: int = 16):
    return {"image": torch.randn(rows, 3, side, side), "label": torch.arange(rows) % CLASSES}


def pixels(rows: int):
    return torch.randn(rows, 3, 16, 16), torch.randn(rows, 7, 12), torch.randn(rows, 3, 16, 16)


def tags(rows: int):
    return {"ids": torch.arange(rows * 6).view(rows, 6) % 50, "tags": torch.zeros(rows, 6, dtype=torch.int64)}


def masked(rows: int):
    ids = torch.arange(rows * 12).view(rows, 12) % 50
    return {"ids": ids, "mask": torch.ones_like(ids), "labels": ids}


def pairs(rows: int):
    source, target = torch.arange(rows * 12).view(rows, 12) % 50, torch.arange(rows * 8).view(rows, 8) % 50
    return {"source": source, "target": target, "labels": target}


# Name to model, batch, loss, and by how many bytes the count may be off: a CPU keeps means and scales of norms in bf16. The
# images of a ViT are off by one more copy: transformers casts them to the dtype of a sharded weight, and FSDP casts them back.
MODELS = {
    "convnet": (ConvNet, images, rows_loss, 256),
    "unet": (UNet, pixels, pixel_loss, 256),
    "tagger": (Tagger, tags, tag_loss, 64),
    "vit": (vit, images, rows_loss, 6144),
    "bert": (bert, masked, masked_loss, 3072),
    "t5": (t5, pairs, pair_loss, 1024),
}


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name][0]().train()


def described(name: str, rows: int = ROWS) -> fs.Description:
    """The model with its costs. Not remembered: some tests trace it in other ways."""
    _, batch, loss, _ = MODELS[name]
    return on_torch.describe(build(name), example=batch(rows), loss=loss)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_the_engine_at_other_rows_too(name, monkeypatch):
    _, batch, loss, few = MODELS[name]
    found = described(name)
    assert found.costs is not None
    assert found.costs.shape is None
    plans = [fs.zero3(found, devices=4, precision=BF16, batch=found.batch(4), remat=remat) for remat in ("none", "full")]
    measured = [live.run_step(build(name), plan, loss, 0, [batch(4)]).peak for plan in plans]
    _without_cuda(monkeypatch)
    predicted = [_peak(peak_memory.steady(plan, found, schedule(plan, found), slots=2)) for plan in plans]
    assert [abs(p - m) <= few for p, m in zip(predicted, measured, strict=True)] == [True, True], (predicted, measured)


def flops(description: fs.Description, rows: int, kind: str) -> int:
    trace = description.costs.trace("bf16", "plain", "none")
    return sum(evaluate(op.flops, rows, 1) for _, _, section in trace for op in section.ops if op.kind == kind)


def test_convolutions_are_counted_as_torch_counts_them():
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = ConvNet(), images(ROWS)
    with FlopCounterMode(display=False) as counter:
        rows_loss(model, batch).sum.backward()
    counted = counter.get_flop_counts()["Global"]
    convolutions = sum(n for op, n in counted.items() if "convolution" in str(op))
    assert flops(described("convnet"), ROWS, "conv") == convolutions
    assert flops(described("convnet"), ROWS, "conv") + flops(described("convnet"), ROWS, "gemm") == sum(counted.values())


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(image)


@pytest.mark.parametrize("last", [False, True])
def test_copies_between_layouts_are_counted_where_channels_do_not_lie_last(last):
    """3 × 3 in bf16 reads and writes copies of input, weight and result; 1 × 1 does not, nor where channels lie last already."""
    rows, side = 4, 16
    form = torch.channels_last if last else torch.contiguous_format
    make = lambda n: {"image": torch.randn(n, 3, side, side).contiguous(memory_format=form), "labels": torch.arange(n)}
    loss = lambda model, b: on_torch.Loss(model(b["image"]).float().sum(), len(b["labels"]))
    found = on_torch.describe(Bottleneck(), example=make(rows), loss=loss)
    sections = [s for _, _, s in found.costs.trace("bf16", "plain", "none")]
    copies = [e.sizes(rows, 1)[0] for s in sections for e in s.events if e.rule == "layout_copies"]
    image, result, weight = (2 * n for n in (rows * 3 * side**2, rows * 8 * side**2, 8 * 3 * 9))
    assert copies == ([] if last else [image + result + weight] * 2)  # forward; in backward that of the weight's gradient
    norms = [op for s in sections for op in s.ops if op.kind == "reduction"]
    assert [[evaluate(n, rows, 1) for n in op.shape] for op in norms] == [[4 * side**2, rows * 2]]  # elements of a group, groups


def test_depthwise_convolutions_take_longer_where_channels_do_not_lie_last():
    def seconds(form: torch.memory_format) -> float:
        model = nn.Sequential(nn.Conv2d(64, 64, 7, padding=3, groups=64, bias=False))
        batch = {"image": torch.randn(8, 64, 56, 56).contiguous(memory_format=form)}
        found = on_torch.describe(model, example=batch, loss=lambda m, b: on_torch.Loss(m[0](b["image"]).float().sum(), 8))
        plan = fs.ddp(found, devices=1, precision=BF16, batch=found.batch())
        return timeline(plan, found, fs.Cluster.load("1xh200")).compute["gemm"]

    assert seconds(torch.contiguous_format) == pytest.approx(4 * seconds(torch.channels_last))


def test_transposed_convolutions_are_counted_as_torch_counts_them():
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = UNet(), pixels(ROWS)
    with FlopCounterMode(display=False) as counter:
        pixel_loss(model, batch).sum.backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "convolution" in str(op))
    assert flops(described("unet"), ROWS, "conv") == counted


@pytest.mark.parametrize("name", ["convnet", "bert"])
def test_skipping_equal_blocks_changes_nothing(name, monkeypatch):
    from fullshard.on_torch.tracing import repeated_blocks

    skipped = described(name)
    monkeypatch.setattr(repeated_blocks, "MIN_EQUAL", 1000)
    whole = described(name)
    for remat in ("none", "selective", "full"):
        plan = fs.zero3(whole, devices=4, precision=BF16, remat=remat)
        assert peak_memory.predict(plan, skipped).allocated == peak_memory.predict(plan, whole).allocated


def test_strategies_search_and_estimate():
    found = described("convnet", 8)
    plan = fs.zero3(found, devices=8)
    assert plan.batch == fs.Batch(8, 1, dims="3×16×16")
    assert "8 rows of 3×16×16, 1 accumulated" in str(plan)
    assert fs.Plan.from_json(plan.to_json()) == plan
    best, estimate = fs.find_plan(found, fs.Cluster.load("8xh100"), global_batch=256)
    assert best.mesh.data * best.batch.micro_batch * best.batch.accumulate == 256
    assert estimate.counted == "rows"
    assert " rows/s" in str(estimate)
    assert "note: of cuDNN's workspace for convolutions only the copies between layouts are counted" in str(estimate)
    again = fs.estimate(best, found, fs.Cluster.load("8xh100"))
    assert again.step_seconds == pytest.approx(estimate.step_seconds)


def test_the_bytes_of_a_batch_are_those_of_its_tensors():
    example = described("bert").costs.example
    assert {name: evaluate(size, 5, 1) for name, size in example.inputs.items()} == dict.fromkeys(("ids", "mask", "labels"), 480)


class Uneven(ConvNet):
    """A model whose work is no line in the number of rows."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image) + (image.flatten(1) @ image.flatten(1).T).mean()


def test_a_model_that_does_not_scale_is_traced_at_the_examples_rows():
    with torch.device("meta"):
        model = Uneven()
    found = on_torch.describe(model, example=images(6), loss=rows_loss)
    assert found.costs.shape == (6, 1)
    fs.estimate(fs.zero3(found, devices=8, precision=BF16), found, fs.Cluster.load("8xh100"))
    plan = fs.zero3(found, devices=8, precision=BF16, batch=found.batch(4))
    with pytest.raises(FullshardError, match=r"traced for 6 rows only; describe it with an example of 4 rows"):
        fs.estimate(plan, found, fs.Cluster.load("8xh100"))


class Branching(ConvNet):
    def forward(self, image: Tensor) -> Tensor:
        if image.mean().item() > 0:
            image = -image
        return super().forward(image)


class Looking(Tagger):
    """Looks at some tokens, as models of transformers do to warn of padding."""

    def forward(self, ids: Tensor) -> Tensor:
        assert 51 not in ids[:, [-1, 0]]
        return super().forward(ids)


def test_a_model_may_read_tokens_at_listed_positions():
    with torch.device("meta"):
        model = Looking()
    found = on_torch.describe(model, example=tags(2), loss=tag_loss)
    assert found.costs.shape is None


class WithNumpy(ConvNet):
    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image) * float(image.detach().numpy().sum())


@pytest.mark.parametrize(
    ("kind", "line"), [(Branching, "if image.mean().item() > 0:"), (WithNumpy, "float(image.detach().numpy().sum())")]
)
def test_a_model_that_reads_values_is_refused_with_its_line(kind, line):
    with torch.device("meta"):
        model = kind()
    with pytest.raises(FullshardError) as raised:
        on_torch.describe(model, example=images(2), loss=rows_loss)
    text = str(raised.value)
    assert f"{kind.__name__} cannot be traced: test_any_describe.py line " in text
    assert line in text
    assert "plan by a named strategy" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"example": images(2)}, "an example needs its loss; write describe"),
        ({"example": 3, "loss": rows_loss}, "an example is a batch as train_step takes it, not an int"),
        ({"example": {}, "loss": rows_loss}, "an example is a batch as train_step takes it, not a dict"),
        ({"example": images(2), "loss": rows_loss, "sequence": 8}, "an example has a shape of its own"),
        ({"loss": rows_loss}, "loss has no effect without an example"),
        ({"costs": False}, "costs = False has no effect without a batch"),
        ({"example": images(2, 1), "loss": rows_loss}, "ConvNet does not run on this example with parameters in bf16: "),
    ],
)
def test_refused(arguments, sentence):
    with pytest.raises(FullshardError) as raised:
        on_torch.describe(build("convnet"), **arguments)
    assert sentence in str(raised.value)


def test_a_batch_of_tokens_does_not_fit_a_model_of_images():
    found = described("convnet")
    with pytest.raises(FullshardError, match=r"was described for rows of 3×16×16; write batch=description.batch\(2\)"):
        fs.zero3(found, devices=2, batch=fs.Batch(2, 128))
    plan = dataclasses.replace(fs.zero3(found, devices=8, precision=BF16), batch=fs.Batch(2, 128))
    with pytest.raises(FullshardError, match=r"described for rows of 3×16×16, the plan is for rows of 128 tokens"):
        fs.estimate(plan, found, fs.Cluster.load("8xh100"))
    with pytest.raises(FullshardError, match="sequence = 128 has no effect"):
        fs.find_plan(found, fs.Cluster.load("8xh100"), sequence=128)


def test_a_scalar_has_sizes():
    """CLIP's temperature."""
    model = ConvNet()
    model.temperature = nn.Parameter(torch.tensor(2.0))
    described = on_torch.describe(model)
    sizes = unit_sizes(fs.zero3(described, devices=4), described)
    assert sum(1 in unit.shards for unit in sizes.values()) == 1
