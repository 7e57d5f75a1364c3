"""`save_pretrained` on ranks, beside what the unsharded model's own writes. For `test_saved_models`."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fullshard as fs
from fullshard import on_torch
from fullshard.checkpoint.other_formats.export import export
from fullshard.on_torch.parallelize import save_pretrained
from fullshard.on_torch.ranks import gather_tensors
from fullshard.plan.plan import Home
from tests.cpu import hugging_face, parity
from tests.cpu.interop import whole

HOME = Home()


@dataclass(frozen=True)
class Case:
    """`gathered`: a forward comes before, after which zero1 and ddp keep gathered copies."""

    model: str = "llama"
    strategy: str = "zero3"
    home: Home = HOME
    compute: str = "fp32"
    lora: bool = False
    gathered: bool = False
    tensor: int = 1
    limit: str | None = None


def trained(case: Case, disk: str = "") -> on_torch.State:
    """A sharded model after a step."""
    model, world = hugging_face.build(case.model, lora=case.lora), dist.get_world_size()
    choices: dict[str, Any] = {"tensor": case.tensor} if case.tensor > 1 else {}
    choices |= {"batch": fs.Batch(2, 8), "precision": fs.Precision(compute=case.compute)}
    plan = fs.strategy(case.strategy, on_torch.describe(model), devices=world, **choices)
    for unit in plan.units:
        plan = plan.change(unit.name, home=case.home)
    on_disk = "disk" in (case.home.params, case.home.optimizer)
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-2), seed=3, disk=disk if on_disk else None, first_step_checks=False)
    ids = torch.randint(0, parity.VOCAB, (2, 9), generator=torch.Generator().manual_seed(on_torch.data_rank(plan.mesh)))
    on_torch.train_step(state, [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}])
    if case.gathered:
        state.model(torch.zeros(1, 4, dtype=torch.long))
    return state


def unsharded(case: Case, weights: dict[str, torch.Tensor]) -> nn.Module:
    model = hugging_face.plain(case.model, lora=case.lora)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    return model


def tensors(directory: str) -> dict[str, torch.Tensor]:
    return {n: t for path in sorted(Path(directory).glob("*.safetensors")) for n, t in load_file(path).items()}


def texts(directory: str) -> dict[str, str]:
    """Configs and the like."""
    return {p.name: p.read_text() for p in Path(directory).iterdir() if ".safetensors" not in p.name}


def beside_unsharded(case: Case, directory: str) -> dict[str, Any]:
    """What differs between the files of both. Every rank names a directory of its own; only the first rank's is written."""
    mine, plain = f"{directory}/{dist.get_rank()}", f"{directory}/plain"
    options = {"max_shard_size": case.limit} if case.limit else {}
    with tempfile.TemporaryDirectory() as disk:
        state = trained(case, disk)
        with counted() as gathered:
            state.model.save_pretrained(mine, **options)
        weights = whole(state)
    if dist.get_rank():
        return {"written": Path(mine).exists()}
    unsharded(case, weights).save_pretrained(plain, **options)
    found, wanted = tensors(mine), tensors(plain)
    assert found.keys() == wanted.keys()
    return {
        "apart": max(float((found[n] - wanted[n]).abs().max()) for n in wanted),
        "dtypes": {t.dtype for t in found.values()} | {t.dtype for t in wanted.values()},
        "texts": [name for name, text in texts(plain).items() if texts(mine).get(name) != text],
        "files": [len(list(Path(d).glob("*.safetensors"))) for d in (mine, plain)],
        "gathers": len(gathered),
        "parameters": len(weights),
    }


def all_beside_unsharded(cases: list[Case], directory: str) -> list[dict[str, Any]]:
    return [beside_unsharded(case, f"{directory}/{i}") for i, case in enumerate(cases)]


@contextmanager
def counted() -> Iterator[list[int]]:
    """The tensors that are gathered inside."""
    found: list[int] = []
    collect = gather_tensors.TensorGather._collect

    def counting(self, index: int) -> torch.Tensor:
        found.append(index)
        return collect(self, index)

    gather_tensors.TensorGather._collect = counting
    try:
        yield found
    finally:
        gather_tensors.TensorGather._collect = collect


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def on_one_rank(directory: str) -> dict[str, Any]:
    """Rank 0 alone, then the other alone; then both."""
    state, first = trained(Case()), dist.get_rank() == 0
    before, save_pretrained.PATIENCE = save_pretrained.PATIENCE, 0.5
    start, found = time.monotonic(), {}
    try:
        if first:
            found["alone"] = said(lambda: state.model.save_pretrained(f"{directory}/alone"))
        dist.barrier()
        if not first:
            found["alone"] = said(lambda: state.model.save_pretrained(f"{directory}/alone"))
        found["seconds"] = time.monotonic() - start
        dist.barrier()
    finally:
        save_pretrained.PATIENCE = before
    return found | {"both": said(lambda: state.model.save_pretrained(f"{directory}/both"))}


def with_arguments(directory: str) -> dict[str, Any]:
    """Options of the library, right and wrong."""
    state, rank = trained(Case()), dist.get_rank()
    model, found = state.model, {}
    found["malformed"] = said(lambda: model.save_pretrained(f"{directory}/malformed", max_shard_size="much"))
    found["distributed"] = said(lambda: model.save_pretrained(f"{directory}/dcp", distributed_checkpoint=True))
    model.save_pretrained(f"{directory}/variant", is_main_process=rank == 0, variant="best")
    model.save_pretrained(f"{directory}/sharded", True, model.state_dict())
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(f"{directory}/whole", state_dict=gathered)
    model.model.save_pretrained(f"{directory}/inner")
    dist.barrier()
    weights = whole(state)
    if rank == 0:
        found["variant"] = (Path(directory) / "variant" / "model.best.safetensors").exists()
        for name in ("variant", "sharded", "whole"):
            found[name] = far(tensors(f"{directory}/{name}"), weights)
        found["inner"] = far({f"model.{n}": t for n, t in tensors(f"{directory}/inner").items()}, weights, some=True)
    return found


def far(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], *, some: bool = False) -> float:
    assert found.keys() == weights.keys() or (some and found.keys() < weights.keys())
    return max(float((found[n] - weights[n]).abs().max()) for n in found)


def files_with_a_scalar(directory: str) -> dict[str, Any]:
    """Files that CLIP writes and files of it sharded, which read those."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    text, vision = {**small, "vocab_size": 40, "max_position_embeddings": 16}, {**small, "image_size": 8, "patch_size": 4}
    config, plain = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8), f"{directory}/plain"
    if dist.get_rank() == 0:
        CLIPModel(config).save_pretrained(plain)
    dist.barrier()
    with torch.device("meta"):
        model = CLIPModel(config)
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size())
    state = on_torch.shard(model, plan, fs.AdamW(), weights=plain)
    state.model.save_pretrained(f"{directory}/saved")
    fs.checkpoint.save(f"{directory}/run", state)
    found: dict[str, Any] = {"state": tuple(state.model.logit_scale.shape)}
    if dist.get_rank() == 0:
        export(f"{directory}/run", Path(directory) / "exported", "hf", Path(plain))
        wanted = tensors(plain)
        found["shape"] = tuple(wanted["logit_scale"].shape)
        for name in ("saved", "exported"):
            written = tensors(f"{directory}/{name}")
            assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in wanted.items()}, name
            found[name] = far(written, wanted)
    dist.barrier()
    return found


class OwnModel(nn.Module):
    """Saves itself, with `torch.save`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def save_pretrained(self, directory: str) -> None:
        torch.save({"kind": type(self).__name__} | self.state_dict(), f"{directory}/own.pt")

    def push_to_hub(self, directory: str) -> str:
        self.save_pretrained(directory)
        return f"hub/{directory}"


def of_another_library(directory: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model = OwnModel()
    wanted = {n: t.clone() for n, t in model.state_dict().items()}
    state = on_torch.shard(model, fs.zero3(on_torch.describe(model), devices=dist.get_world_size()), fs.AdamW())
    returned = state.model.push_to_hub(directory)
    dist.barrier()
    found = torch.load(f"{directory}/own.pt")
    return {"returned": returned, "kind": found.pop("kind"), "equal": all(torch.equal(found[n], t) for n, t in wanted.items())}
