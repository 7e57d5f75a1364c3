"""Runs on ranks for `test_interop`: the examples for other libraries, and what they are held against."""

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import fullshard as fs
from fullshard import on_torch

ROOT = Path(__file__).parents[2]
ADAMW = fs.AdamW(lr=1e-3)


def example(name: str) -> ModuleType:
    spec = spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def launched() -> Iterator[None]:
    """What torchrun tells its ranks, and an Accelerate that has seen no other test."""
    before = dict(os.environ)
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= address | names | {"TORCHELASTIC_RUN_ID": "test"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def whole(state: on_torch.State) -> dict[str, Tensor]:
    """All weights, gathered; the masters of offloaded units."""
    with state.values() as values:
        return {n: t.full_tensor().detach().clone() for n, t in values.items()}


# -- Hugging Face's Trainer ---------------------------------------------------------------------------------


def of_trainer(trainer: Trainer, weights: dict[str, Tensor]) -> dict[str, Any]:
    logged = [(e["loss"], e["grad_norm"], e["learning_rate"]) for e in trainer.state.log_history if "loss" in e]
    return {"logged": logged, "evaluated": trainer.evaluate()["eval_loss"], "weights": weights}


def trainer(output: str, *, own: bool = True, home: fs.Home | None = None) -> dict[str, Any]:
    """Six steps. `own`: with the state's optimizer, else with that of TrainingArguments."""
    module = example("hf_trainer")
    with launched():
        found = module.make_trainer(6, output, module.ADAMW if own else None, home or fs.Home())
        found.train()
        return of_trainer(found, whole(found.sharded)) | {"steps": found.sharded.step}


def resumed(output: str, *, own: bool = True) -> dict[str, Any]:
    """As after a crash between steps 4 and 6; and the saved model as transformers reads it."""
    module = example("hf_trainer")
    with launched():
        if dist.get_rank() == 0:
            shutil.rmtree(f"{output}/checkpoint-6")
        dist.barrier()
        found = module.make_trainer(6, output, module.ADAMW if own else None)
        found.train(resume_from_checkpoint=True)
        found.save_model(f"{output}/model")
        dist.barrier()
        read = LlamaForCausalLM.from_pretrained(f"{output}/model").state_dict()
        return of_trainer(found, whole(found.sharded)) | {"read": read, "steps": found.sharded.step}


def stock_trainer(output: str, *, own: bool = True) -> dict[str, Any]:
    """The same with transformers alone, on one rank: the oracle."""
    module = example("hf_trainer")
    with launched(), torch.device("meta"):
        model = LlamaForCausalLM(module.CONFIG)
    on_torch.initialize(model, torch.device("cpu"), 0)
    with launched():
        batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 4}
        rates = {"learning_rate": 1e-2, "warmup_steps": 2, "max_grad_norm": 0.5}
        quiet = {"logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        args = TrainingArguments(output, max_steps=6, **batch, **rates, **quiet)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01) if own else None
        data = {"train_dataset": module.samples(64), "eval_dataset": module.samples(16, seed=1)}
        found = Trainer(model, args, optimizers=(optimizer, None), **data)
        found.train()
        return of_trainer(found, {n: p.detach() for n, p in model.named_parameters()})


# -- loops ---------------------------------------------------------------------------------------------------


def loop(name: str, folder: str, *, strategy: str = "zero3") -> dict[str, Any]:
    """Three steps, a save, three more; and those again from the save in a fresh loop."""
    module, save, load, state_of = example(name), *LIBRARIES[name]
    with launched():
        first = module.Loop(strategy)
        losses = first.train(3)
        save(first, folder)
        losses += first.train(3)
        end = whole(state_of(first))
    with launched():
        second = module.Loop(strategy)
        load(second, folder)
        again = second.train(3)
        return {"losses": losses, "weights": end, "again": again, "resumed": whole(state_of(second))}


def _fabric_objects(found: Any) -> dict[str, Any]:
    return {"model": found.model, "optimizer": found.optimizer, "note": "none", "schedule": found.schedule}


def _save_fabric(found: Any, folder: str) -> None:
    found.fabric.save(folder, _fabric_objects(found) | {"note": "three", "more": 3})


def _load_fabric(found: Any, folder: str) -> None:
    objects = _fabric_objects(found)
    assert found.fabric.load(folder, objects) == {"more": 3}
    assert objects["note"] == "three"


Call = Callable[..., Any]
LIBRARIES: dict[str, tuple[Call, Call, Call]] = {
    "accelerate_loop": (
        lambda found, folder: found.accelerator.save_state(folder),
        lambda found, folder: found.accelerator.load_state(folder),
        lambda found: found.state,
    ),
    "fabric_loop": (_save_fabric, _load_fabric, lambda found: found.strategy.sharded),
}


def by_hand() -> dict[str, Any]:
    """What the loops compute, with torch alone."""
    model = on_torch.load_model("llama-nano")
    on_torch.initialize(model, torch.device("cpu"), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    rows, losses = example("accelerate_loop").rows(128), []
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * 0.9**step
        ids = rows[8 * step : 8 * step + 8]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": {n: p.detach() for n, p in model.named_parameters()}}


# -- what is refused ---------------------------------------------------------------------------------------------


def refusals(output: str) -> dict[str, str]:
    from lightning_fabric import Fabric

    from fullshard.on_torch.interop import hf_accelerate
    from fullshard.on_torch.interop.fabric import ShardedStrategy
    from fullshard.on_torch.interop.hf_trainer import ShardedTrainer, ShardedTrainerMixin

    trains = {"per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none", "learning_rate": 1e-3}

    def fabric(plan: fs.Plan, **options: Any) -> Fabric:
        found = Fabric(accelerator="cpu", devices=1, strategy=ShardedStrategy(plan, fs.AdamW(lr=1e-3)), **options)
        found.launch()
        return found

    def train(**changed: Any) -> None:
        ShardedTrainer(state(), TrainingArguments(output, **trains | changed), train_dataset=[]).create_optimizer()

    class Preferring(Trainer):
        """As TRL's DPOTrainer: without a reference model it makes one."""

        def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **options: Any):
            self.reference = copy.deepcopy(model) if ref_model is None else ref_model
            super().__init__(model, args, **options)

    class Sharded(ShardedTrainerMixin, Preferring):
        pass

    def prefer(**reference: Any) -> None:
        Sharded(state(), TrainingArguments(output, **trains), train_dataset=[], **reference)

    def jointly() -> None:
        model = nn.Linear(2, 2)
        fabric(state().plan).setup(model, torch.optim.SGD(model.parameters()))

    calls: dict[str, Call] = {
        "mixed": lambda: hf_accelerate.prepare(Accelerator(cpu=True, mixed_precision="bf16"), state()),
        "fp16": lambda: hf_accelerate.prepare(Accelerator(cpu=True), state("fp16")),
        "bare": lambda: hf_accelerate.prepare(Accelerator(cpu=True), state(optimizer=None)),
        "remat": lambda: train(gradient_checkpointing=True),
        "batch": lambda: train(per_device_train_batch_size=3),
        "accumulate": lambda: train(gradient_accumulation_steps=2),
        "rate": lambda: train(learning_rate=1.0),
        "bf16": lambda: train(bf16=True),
        "model": lambda: ShardedTrainer(state(), model=nn.Linear(1, 1)),
        "reference": lambda: prefer(),
        "second": lambda: prefer(ref_model=state(optimizer=None).model),
        "copied": lambda: copy.deepcopy(state().model),
        "precision": lambda: fabric(state().plan, precision="bf16-mixed").setup_module(nn.Linear(2, 2)),
        "jointly": jointly,
    }
    found = {}
    for name, call in calls.items():
        with launched():
            try:
                call()
                found[name] = "accepted"
            except fs.FullshardError as error:
                found[name] = str(error)
    return found


def state(compute: str = "fp32", optimizer: fs.AdamW | None = ADAMW) -> on_torch.State:
    model = on_torch.load_model("llama-nano")
    precision = fs.Precision(compute=compute)
    plan = fs.zero3(on_torch.describe(model), devices=1, batch=fs.Batch(2, 16), precision=precision)
    return on_torch.shard(model, plan, optimizer)
