"""What the engine does besides sharding: refusals, remat, compile, fp16, evaluation, sampling. Inside ranks."""

import dataclasses
import itertools
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fullshard as fs
from fullshard import FullshardError, on_torch
from fullshard.model.presets import GPTSize, LlamaSize
from fullshard.on_torch.model.built_in import GPT, Llama
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES
from tests.cpu import hugging_face, parity


def shard(model: nn.Module | None = None, **choices):
    model = parity.build("plain") if model is None else model
    choices.setdefault("batch", fs.Batch(2, parity.LENGTH))
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), **choices)
    return on_torch.shard(model, plan, fs.AdamW(lr=1e-3), seed=7)


def batch(rows: int = 2, *, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    ids = torch.randint(0, parity.VOCAB, (rows, parity.LENGTH + 1), generator=draw)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


# -- refusals -----------------------------------------------------------------------------------------


def refusal(kind: str) -> tuple[str, bool]:
    """The sentence, and whether the model was left untouched on meta."""
    model, plan = REFUSED[kind]()
    try:
        on_torch.shard(model, plan)
    except FullshardError as error:
        return str(error), all(p.is_meta and not hasattr(p, "placements") for p in model.parameters())
    return "no refusal", False


def _planned(model: nn.Module, **choices):
    return model, fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), **choices)


def _changed(pattern: str, **choices):
    model, plan = _planned(parity.build("plain"))
    return model, plan.change(pattern, **choices)


def _another_model():
    return parity.build("plain"), _planned(hugging_face.build("gpt2"))[1]


def _missing_unit():
    model, plan = _planned(parity.build("plain"))
    return model, dataclasses.replace(plan, units=plan.units[:-1])


def _tied_apart():
    return parity.build("tied"), _planned(parity.build("plain"))[1]


def _eager_llama():
    model = hugging_face.build("llama")
    model.config._attn_implementation = "eager"
    return model


class _Odd(nn.Module):
    def __init__(self, parameter: nn.Parameter):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.odd = parameter


def _odd(parameter: torch.Tensor, **choices):
    return _planned(_Odd(nn.Parameter(parameter.to("meta"), requires_grad=False)).to("meta"), **choices)


def _more_devices():
    model = parity.build("plain")
    return model, fs.zero3(on_torch.describe(model), devices=8)


def _heads():
    with torch.device("meta"):
        model = Llama(LlamaSize(24, 2, 3, 3, 42, 50))
    return model, fs.zero3(on_torch.describe(model), devices=2, tensor=2)


REFUSED = {
    "attention": lambda: _planned(parity.build("plain"), kernels=fs.Kernels("cudnn")),
    "kernel": lambda: _planned(parity.build("plain"), kernels=fs.Kernels(loss="fused")),
    "update": lambda: _planned(parity.build("plain"), kernels=fs.Kernels(update="torch")),
    "other attention": lambda: _planned(_eager_llama(), kernels=fs.Kernels("flash")),
    "another model": _another_model,
    "missing unit": _missing_unit,
    "tied apart": _tied_apart,
    "home": lambda: _changed("model.layers.1", home=fs.Home(params="disk")),
    "root remat": lambda: (parity.build("plain"), fs.Plan(fs.Mesh(shard=2), (fs.Unit("root", ("",), remat="full"),))),
    "integer": lambda: _odd(torch.zeros(4, dtype=torch.int8)),
    "scalar": lambda: _odd(torch.zeros(()), tensor=2),
    "devices": _more_devices,
    "heads": _heads,
    "compile": lambda: (parity.build("plain"), fs.Plan(fs.Mesh(shard=2), (fs.Unit("root", ("",)),), compile=True)),
}


# -- remat, compile, fp16 -------------------------------------------------------------------------------


def saved_bytes(remat: str) -> int:
    """Bytes that one forward keeps for backward, parameters apart."""
    state = shard(remat=remat)
    on_torch.train_step(state, [batch()])
    parameters = {p.to_local().untyped_storage().data_ptr() for p in state.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor):
        if tensor.untyped_storage().data_ptr() not in parameters and not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = on_torch.summed_loss(state.model, batch())
    found = sum(kept.values())
    loss.backward()
    return found


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self):
        super().__init__()
        self.seen: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(remat: str) -> tuple[dict, dict]:
    """Operators of forward and of backward."""
    state = shard(remat=remat)
    on_torch.train_step(state, [batch()])
    with _Count() as forward:
        loss = on_torch.summed_loss(state.model, batch())
    with _Count() as backward:
        loss.backward()
    return dict(forward.seen), dict(backward.seen)


def compiled(remat: str) -> dict:
    """Compiled and eager runs of the same thing, and how often dynamo compiled a block."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    real = torch.compile
    torch.compile = lambda f, **more: real(f, backend=counter, **more)  # the engine's call, with a backend that counts
    try:
        state = shard(compile=True, remat=remat)
        losses = [float(on_torch.train_step(state, [batch(seed=i)]).loss) for i in range(4)]
    finally:
        torch.compile = real
    frames = counter.frame_count
    torch._dynamo.reset()
    eager = shard(remat=remat)
    want = [float(on_torch.train_step(eager, [batch(seed=i)]).loss) for i in range(4)]
    return {"error": parity.relative(losses, want), "frames": frames}


def attention(remat: str, compile: bool) -> dict:
    """Losses with a backend of attention and without, whether torch could have taken another in a block, and whether it can
    again after the step."""
    import torch._dynamo

    others, real = torch.backends.cuda.math_sdp_enabled, torch.compile
    torch.compile = partial(real, backend="aot_eager")  # the engine's call, without a C++ compiler's minute
    found, inside = {}, []
    for kind in ("auto", "flash"):
        state = shard(remat=remat, compile=compile, kernels=fs.Kernels(kind))
        if kind == "flash" and not compile:
            for block in state.model.model.layers:
                block.self_attn.register_forward_pre_hook(lambda *_: inside.append(others()))
        found[kind] = [float(on_torch.train_step(state, [batch(seed=i)]).loss) for i in range(3)]
    torch._dynamo.reset()
    torch.compile = real
    return {"losses": found, "inside": inside, "after": others(), "kernels": state.kernels}


def inductor() -> float:
    """One real compilation, end to end."""
    state, eager = shard(compile=True), None
    found = [float(on_torch.train_step(state, [batch(seed=i)]).loss) for i in range(3)]
    eager = shard()
    want = [float(on_torch.train_step(eager, [batch(seed=i)]).loss) for i in range(3)]
    return parity.relative(found, want)


def half_precision() -> dict:
    """fp16 with its scaler: an overflow is skipped on all ranks, then training goes on."""
    state = shard(precision=fs.Precision(compute="fp16"))
    assert state.loss_scale is not None
    state.loss_scale.value = 2.0**40
    results = [on_torch.train_step(state, [batch()]) for _ in range(40)]
    return {
        "skipped": sum(r.skipped for r in results),
        "scale": state.loss_scale.value,
        "first": float(results[0].loss),
        "last": float(results[-1].loss),
        "norm": float(results[-1].grad_norm),
    }


def output_dtype() -> tuple[str, str]:
    """The dtype of logits without and with precision.output."""
    found = []
    for output in (None, "fp32"):
        state = shard(precision=fs.Precision(compute="bf16", output=output))
        found.append(str(state.model(batch()["input_ids"]).dtype))
    return found[0], found[1]


def output_dtypes() -> dict[str, list[str]]:
    """The dtypes (compute, master, output) that a plan refuses, and those with which stock FSDP cannot compute two units."""
    found: dict[str, list[str]] = {"refused": [], "impossible": []}
    units = tuple(fs.Unit(name, (name,)) for name in ("0", "1"))
    for kinds in itertools.product(("fp32", "bf16", "fp16"), ("fp32", "bf16"), ("fp32", "bf16", "fp16")):
        compute, master, output = kinds
        try:
            fs.Plan(fs.Mesh(shard=2), units, fs.Precision(compute, master=master, output=output))
        except fs.PlanError:
            found["refused"].append(" ".join(kinds))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(PLAN_DTYPES[master])
        policy = MixedPrecisionPolicy(
            param_dtype=PLAN_DTYPES[compute] if compute != master else None, output_dtype=PLAN_DTYPES[output]
        )
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        try:
            model(torch.ones(1, 4, dtype=PLAN_DTYPES[master]))
        except RuntimeError:
            found["impossible"].append(" ".join(kinds))
    return found


def reduce_dtype() -> set[str]:
    state = shard(precision=fs.Precision(compute="bf16", reduce="bf16"))
    on_torch.train_step(state, [batch()])
    with on_torch.record() as traffic:
        on_torch.train_step(state, [batch()])
    return {str(c.dtype) for c in traffic.collectives if c.kind == "reduce"}


# -- evaluation and sampling --------------------------------------------------------------------------------


def uneven_evaluation() -> tuple[float, float]:
    """Ranks with different numbers of batches; the oracle sees all of them in one process."""
    state = shard()
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone = [[_seeded(r, i) for i in range(r + 1)] for r in range(world)]
    found = on_torch.evaluate(state, everyone[rank])["loss"]
    model = parity.build("plain")
    on_torch.initialize(model, torch.device("cpu"), seed=7)
    batches = [b for mine in everyone for b in mine]
    with torch.no_grad():
        want = sum(on_torch.summed_loss(model, b) for b in batches) / sum((b["labels"] != -100).sum() for b in batches)
    return found, float(want)


def _seeded(rank: int, i: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, parity.VOCAB, (2, parity.LENGTH + 1), generator=torch.Generator().manual_seed(97 * rank + i))
    labels = ids[:, 1:].clone()
    labels[0, : 3 * rank] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def samples() -> tuple[list[int], list[int]]:
    """Each rank its own prompt, its own stop; and what the unsharded model says to the same prompt."""
    prompt = [1 + dist.get_rank()] * (2 + dist.get_rank())
    state = shard(remat="full")
    plain = parity.build("plain")
    on_torch.initialize(plain, torch.device("cpu"), seed=7)
    want = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            want.append(int(plain(torch.tensor([want]))[0, -1].argmax()))
    stop = want[len(prompt) + 1 + dist.get_rank()]  # ranks stop at different lengths
    want = want[: want.index(stop, len(prompt)) + 1]
    return on_torch.generate(state.model, prompt, max_new_tokens=6, temperature=0, stop=stop), want


def hugging_face_generate() -> tuple[list[int], list[int]]:
    """Hugging Face's own generate, prompts and ends of different lengths."""
    state = shard(hugging_face.build("llama"), remat="full")
    plain = hugging_face.plain("llama")
    prompt = torch.tensor([[5 + dist.get_rank()] * (2 + 2 * dist.get_rank())])
    free = plain.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0].tolist()
    end = free[prompt.shape[1] + 1 + 2 * dist.get_rank()]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    want = plain.generate(prompt, **options)[0].tolist()
    found = state.model.generate(prompt, **options)[0].tolist()
    on_torch.train_step(state, [batch()])  # and training goes on after it
    return found[: len(want)], want


def capped_logits() -> str:
    """Gemma 2 caps its logits after the head: a loss computed in the head would miss that."""
    from transformers import AutoModelForCausalLM

    config = hugging_face.config("gemma2")
    config.final_logit_softcapping = 0.05  # small logits, as of a fresh model, are capped too
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = shard(model)
    try:
        on_torch.train_step(state, [batch()], loss=on_torch.chunked_loss)
    except FullshardError as error:
        return str(error)
    return "no error"


def chunked_hugging_face() -> tuple[float, float]:
    """The loss after three steps with either."""
    found = []
    for loss in (on_torch.chunked_loss, on_torch.summed_loss):
        state = shard(hugging_face.build("qwen2"), remat="full")
        for i in range(3):
            result = on_torch.train_step(state, [batch(seed=i)], loss=loss)
        found.append(float(result.loss))
    return found[0], found[1]


def dropout() -> list[float]:
    """GPT with dropout trains, with remat and without, to the same losses: the recomputation drops the same."""
    losses = []
    for remat in ("none", "full"):
        with torch.device("meta"):
            model = GPT(GPTSize(24, 2, 4, parity.VOCAB, 32, dropout=0.2))
        state = shard(model, remat=remat)
        torch.manual_seed(dist.get_rank())
        for i in range(3):
            loss = on_torch.train_step(state, [batch(seed=i)]).loss
        losses.append(float(loss))
    return losses


def step_without_labels() -> tuple[float, float, bool]:
    """A later step in which no token has a label: (loss, gradient norm, whether all weights stay finite)."""
    state = shard()
    on_torch.train_step(state, [batch()])
    empty = batch(seed=1)
    empty["labels"] = torch.full_like(empty["labels"], -100)
    result = on_torch.train_step(state, [empty])
    finite = all(bool(p.to_local().isfinite().all()) for p in state.model.parameters())
    return float(result.loss), float(result.grad_norm), finite


def wrong_batch(kind: str) -> str:
    state = shard(batch=fs.Batch(2, 8, 2))
    ids = torch.zeros(2, 8, dtype=torch.long)
    good = {"input_ids": ids, "labels": ids}
    batches = {
        "too few": [good],
        "rows": [good, {"input_ids": ids.repeat(2, 1), "labels": ids.repeat(2, 1)}],
        "length": [good, {"input_ids": torch.zeros(2, 9, dtype=torch.long), "labels": torch.zeros(2, 9, dtype=torch.long)}],
        "keys": [good, {"tokens": ids}],
    }[kind]
    try:
        on_torch.train_step(state, batches)
    except FullshardError as error:
        return str(error)
    return "no error"
