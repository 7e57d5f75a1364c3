"""The same training with activations on the device and in host memory. Runs inside ranks."""

import gc
import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fullshard as fs
from fullshard import FullshardError, on_torch
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.model.built_in import Llama
from fullshard.on_torch.offload.activations import activation_hooks as hooks
from fullshard.on_torch.offload.activations import host_pool
from fullshard.on_torch.parallelize.remat import keep_products_by
from tests.cpu import hugging_face, parity

ROWS, LENGTH, STEPS = 2, parity.LENGTH, 4
HOST = fs.Home(activations="host")


@dataclass(frozen=True)
class Case:
    model: str = "plain"  # plain | tied | lora, or a Hugging Face model
    remat: str = "none"
    compute: str = "fp32"
    accumulate: int = 1
    loss: str = "summed"
    strategy: str = "zero3"
    arguments: dict = field(default_factory=dict)
    compile: bool = False
    blocks: str = "*.[012]"

    def __str__(self) -> str:
        parts = (self.model, self.remat, self.compute, f"acc{self.accumulate}", self.loss, self.strategy, *self.arguments)
        return "-".join((*parts, "compiled") if self.compile else parts)


def build(name: str) -> nn.Module:
    return parity.build(name) if name in ("plain", "tied", "lora") else hugging_face.build(name)


def start(case: Case, *, host: bool) -> on_torch.State:
    model = build(case.model)
    plan = fs.strategy(
        case.strategy,
        on_torch.describe(model),
        devices=dist.get_world_size(),
        **case.arguments,
        precision=fs.Precision(compute=case.compute),
        batch=fs.Batch(ROWS, LENGTH, case.accumulate),
        remat=case.remat,
        compile=case.compile,
    )
    plan = plan.change(case.blocks, home=HOST) if host else plan
    # Plain descent: parameters equal to the bit after a step had gradients equal to the bit in it.
    checks = parity.checked(model)
    return on_torch.shard(model, plan, fs.SGD(lr=0.1), seed=7, device=parity.DEVICE, first_step_checks=checks)


def batches(state: on_torch.State, step: int, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    plan = state.plan
    draw = torch.Generator().manual_seed(100 * step + on_torch.data_rank(plan.mesh))
    ids = torch.randint(0, parity.VOCAB, (plan.batch.accumulate, ROWS, length + 1), generator=draw).to(state.device)
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in ids]


def train(state: on_torch.State, loss: str = "summed", steps: int = STEPS):
    """Losses and norms of each step, the parameters after them, and the bytes spilled and fetched in each."""
    numbers, moved, before = [], [], (0, 0)
    for i in range(steps):
        result = on_torch.train_step(state, batches(state, i), loss=getattr(on_torch, f"{loss}_loss"))
        numbers.append((result.loss.item(), result.grad_norm.item()))
        if state.activations:
            now = (state.activations.spilled, state.activations.fetched)
            moved.append((now[0] - before[0], now[1] - before[1]))
            before = now
    return numbers, [p.to_local().clone() for p in state.model.parameters()], moved


def compare(case: Case) -> dict:
    want, params, _ = train(start(case, host=False), case.loss)
    state = start(case, host=True)
    found, other, moved = train(state, case.loss)
    assert state.activations is not None
    state.activations.free_forgotten()
    return {
        "numbers": found == want,
        "params": all(torch.equal(a, b) for a, b in zip(other, params, strict=True)),
        "moved": moved,
        "left": len(state.activations.seen),
    }


def small_too(function, *args):
    """`function` on a GPU, where small tensors would stay, and two runs of one program may differ."""
    small, hooks.SMALL["cuda"] = hooks.SMALL["cuda"], 1
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return function(*args)
    finally:
        hooks.SMALL["cuda"] = small
        torch.use_deterministic_algorithms(False)


def saved(case: Case, blocks: list[int]) -> int:
    """Bytes that autograd keeps in those blocks, whole storages, each once, parameters apart."""
    state = start(case, host=False)
    parameters: set[int] = set()
    kept: dict[int, tuple[torch.UntypedStorage, int]] = {}  # held, so that no address comes twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)

    def enter(module, args):
        parameters.clear()  # those of the last block are freed: an activation may lie where they were
        parameters.update(p.untyped_storage().data_ptr() for p in module.parameters())
        hooks.__enter__()

    for i in blocks:
        block = state.model.model.layers[i]
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(lambda *_: hooks.__exit__())
    on_torch.summed_loss(state.model, batches(state, 0)[0]).backward()
    return sum(n for _, n in kept.values())


def freed() -> list[bool]:
    """For each block, whether the input of its last product is gone from the device after forward."""
    state = start(Case(), host=True)
    inputs = []
    for layer in state.model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    loss = on_torch.summed_loss(state.model, batches(state, 0)[0])
    found = [ref.expired() for ref in inputs]
    loss.backward()
    return found


def ahead(remat: str, blocks: str, layers: int) -> list[int]:
    """Block inputs fetched by the time that backward comes to each block, the last one first."""
    with torch.device("meta"):
        model = Llama(LlamaSize(24, layers, 4, 2, 42, parity.VOCAB, 64))
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(ROWS, LENGTH), remat=remat)
    state = on_torch.shard(model, plan.change(blocks, home=HOST), fs.SGD(lr=0.1), seed=7, device=parity.DEVICE)
    found: list[int] = []
    assert state.activations is not None
    for layer in state.model.model.layers:
        layer.mlp.register_full_backward_pre_hook(lambda *_: found.append(state.activations.fetched))
    on_torch.summed_loss(state.model, batches(state, 0)[0]).backward()
    assert state.activations.fetched == state.activations.spilled
    return [n // (ROWS * LENGTH * 24 * 4) for n in found]


def without_backward() -> dict:
    """Evaluation, a forward that fails, a forward that nobody follows with backward: nothing stays behind."""
    state = start(Case(), host=True)
    spill = state.activations
    assert spill is not None
    on_torch.evaluate(state, batches(state, 9))
    evaluated = spill.spilled
    handle = state.model.model.layers[1].mlp.register_forward_pre_hook(_fail)
    try:
        state.model(batches(state, 0)[0]["input_ids"])
    except ArithmeticError:
        handle.remove()
    on_torch.summed_loss(state.model, batches(state, 0)[0])  # and dropped
    spill.free_forgotten()
    free = [c.ranges.free == [(0, c.nbytes)] for c in spill.pool.chunks]
    numbers, _, _ = train(state)
    return {"evaluated": evaluated, "free": all(free), "open": spill.open, "same": numbers == train(start(Case(), host=False))[0]}


def collected_while_freeing() -> bool:
    """The garbage collector drops one storage while another one's place is being freed. Whether all is free afterwards."""
    spill = hooks.Activations(torch.device("cpu"), keep_products_by, reach=1)
    held = [spill._spill(torch.zeros(512, dtype=torch.uint8), hooks._Visit(i, None)) for i in range(3)]
    cycle = [held.pop(1)]
    cycle.append(cycle)
    del cycle
    plain, host_pool.insort = host_pool.insort, lambda *given: (plain(*given), gc.collect())
    gc.disable()  # until then
    try:
        held.clear()
        spill.free_forgotten()
    finally:
        host_pool.insort = plain
        gc.enable()
    return all(c.ranges.free == [(0, c.nbytes)] for c in spill.pool.chunks) and not spill.seen


def _fail(*_) -> None:
    raise ArithmeticError


def longer() -> tuple[list[str], bool, list[int]]:
    """A first step of short rows: what is said when longer ones come, and that it is said once."""
    found, held = [], []
    smallest, host_pool.SMALLEST = host_pool.SMALLEST, 512
    try:
        states = [start(Case(remat="full"), host=host) for host in (True, False)]
        for i, length in enumerate((4, 4, 12, 4, 12)):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                numbers = [on_torch.train_step(s, batches(s, i, length)).loss.item() for s in states]
            found += [str(w.message) for w in heard if "activations need" in str(w.message)]
            held.append(states[0].activations.pool.nbytes)
        return found, numbers[0] == numbers[1], held
    finally:
        host_pool.SMALLEST = smallest


def nothing_large() -> str:
    small, hooks.SMALL["cpu"] = hooks.SMALL["cpu"], 1 << 20
    try:
        train(start(Case(), host=True))
    except FullshardError as error:
        return str(error)
    finally:
        hooks.SMALL["cpu"] = small
    return "no error"


def twice() -> bool:
    """A graph that is kept may be gone through again."""
    found = []
    for host in (False, True):
        state = start(Case(remat="none", strategy="zero2"), host=host)
        loss = on_torch.summed_loss(state.model, batches(state, 0)[0])
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad.to_local().clone() for p in state.model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- refusals -----------------------------------------------------------------------------------------


def refusal(kind: str) -> str:
    model = parity.build("plain")
    if kind == "frozen":
        for name, p in model.named_parameters():
            p.requires_grad_("layers.2" in name)
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size())
    units = {
        "last": ("*.2", HOST),
        "embedding": ("embed", HOST),
        "frozen": ("*.1", HOST),
    }
    if kind in units:
        plan = plan.change(units[kind][0], home=units[kind][1])
    elif kind == "around":
        plan = fs.Plan(plan.mesh, (fs.Unit("root", ("",), home=HOST), *plan.units))
    else:
        outer = fs.Unit("decoder", ("model",), remat="full")
        plan = fs.Plan(plan.mesh, (outer, *plan.change("*.1", home=HOST).units[1:-1], fs.Unit("head", ("lm_head",))))
    try:
        on_torch.shard(model, plan)
    except FullshardError as error:
        return str(error)
    return "no refusal"
