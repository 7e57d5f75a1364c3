"""Time a training step with its state in host memory or on disk, and the lower bounds of this machine.

    python benchmarks/homes.py floors --disk /disk                        # this machine's rates
    python benchmarks/homes.py case --preset llama-3.6b --batch 2 --sequence 4096 --optimizer host
    python benchmarks/homes.py case --preset llama-3.6b --batch 2 --sequence 4096 --optimizer host --accumulate 4 --clip 1

Every case prints one JSON line: the step time, `flush_s`, tokens per second, peak memory, and bytes by home. The step
time is the mean over consecutive steps, each from one loss to the next, so that updates which overlap with the next step
count once. `flush_s` is the time of the updates that are left after the last step. `--update none` leaves the optimizer
out. `dram_at_once_gbs` is the rate of host memory while the CPU updates and PCIe copies in both directions: no step moves
its bytes faster.
"""

import argparse
import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import torch

import fullshard as fs
from fullshard import on_torch
from fullshard.base.text import bytes_text
from fullshard.on_torch.loss.losses import LossFunction
from fullshard.on_torch.offload.updates import cpu_share
from fullshard.on_torch.optimizers.adam_update import rule_of
from fullshard.on_torch.ranks.device_presets import local_cluster
from fullshard.storage.disk_speed import disk_rates

GIB = 1 << 30
# Bytes of host memory per parameter that the trials move: by the CPU (state in and out, gradient in, parameter out) and over
# PCIe (state up and down).
UPDATED, STREAMED = 30, 24


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="what", required=True)
    floors = sub.add_parser("floors")
    floors.add_argument("--disk", type=Path)
    case = sub.add_parser("case")
    case.add_argument("--preset", default="llama-bytes")
    case.add_argument("--batch", type=int, default=2)
    case.add_argument("--sequence", type=int, default=128)
    case.add_argument("--accumulate", type=int, default=1)
    case.add_argument("--remat", default="full")
    case.add_argument("--compute", default="bf16")
    case.add_argument("--reduce", default="fp32")
    case.add_argument("--compile", action="store_true")
    case.add_argument(
        "--clip", type=float, nargs="+", default=[0.0], help="0: no clipping; several values alternate on one state"
    )
    case.add_argument("--loss", default="summed", choices=["summed", "chunked"])
    case.add_argument("--optimizer", default="device", choices=["device", "host", "disk"])
    case.add_argument("--params", default="device", choices=["device", "host"])
    case.add_argument("--part", type=float, default=1.0, help="share of the units that have these homes, from the first on")
    case.add_argument(
        "--rest", default="device", choices=["device", "host", "disk"], help="home of the other units' optimizer state"
    )
    case.add_argument("--cpu-share", type=float)
    case.add_argument("--staging", type=int, help="by default that of `fs.tune_updates`, as in a run of a recipe")
    case.add_argument("--backlog", type=int, help="pieces whose gradients may wait on the device while backward runs")
    case.add_argument("--disk", type=Path)
    case.add_argument("--cap", type=float, help="limit of device memory, in GiB")
    case.add_argument("--update", default="all", choices=["all", "none"])
    case.add_argument("--steps", type=int, default=6)
    case.add_argument("--warm", type=int, default=3)
    return parser.parse_args()


def measure_floors(args: argparse.Namespace) -> dict[str, float]:
    device, rule = on_torch.start(), rule_of(fs.AdamW())
    found = {
        "threads": float(cpu_share.update_threads()),
        "cpu_adamw_ns": cpu_share.cores_seconds(rule) / cpu_share.ELEMENTS * 1e9,
    }
    if device.type == "cuda":
        found["pcie_each_way_gbs"] = 12 * cpu_share.ELEMENTS / cpu_share.bus_seconds(device, rule) / 1e9
        found["share"] = cpu_share.measured_share(device, rule, fs.Precision(), streamed=10, sent=8)
        cores, bus = cpu_share.at_once(device, rule)
        found["dram_at_once_gbs"] = (UPDATED / cores + STREAMED / bus) / 1e9
    if args.disk:
        rates = disk_rates(args.disk)
        found |= {
            "disk_read_gbs": rates.read / 1e9,
            "disk_write_gbs": rates.write / 1e9,
            "disk_both_gbs": (rates.both or 0.0) / 1e9,
        }
    return found


def plan_for(args: argparse.Namespace, model: torch.nn.Module) -> fs.Plan:
    description = on_torch.describe(model)
    plan = fs.zero3(
        description,
        devices=1,
        precision=fs.Precision(compute=args.compute, reduce=args.reduce),
        batch=fs.Batch(args.batch, args.sequence, args.accumulate),
        remat=args.remat,
        compile=args.compile,
    )
    count = round(args.part * len(plan.units))
    for i, unit in enumerate(plan.units):
        home = fs.Home(args.params, args.optimizer) if i < count else fs.Home("device", args.rest)
        plan = plan.change(unit.name, home=home)
    plan = replace(plan, backlog=args.backlog)
    if args.staging is not None or args.cpu_share is not None or not plan.offloads_state:
        return replace(plan, staging=args.staging or plan.staging)
    arguments = {"clip": bool(args.clip[0]), "loss": "chunked" if args.loss == "chunked" else "plain"}
    return fs.tune_updates(plan, fs.presets.describe(args.preset), local_cluster(1), **arguments)[0]


def run_case(args: argparse.Namespace) -> list[dict[str, object]]:
    device = on_torch.start()
    if args.cap:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(args.cap * GIB / total)
    model = on_torch.load_model(args.preset)
    plan = plan_for(args, model)
    began = time.perf_counter()
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-4), disk=args.disk, cpu_share=args.cpu_share, first_step_checks=False)
    ready = time.perf_counter() - began
    vocab = fs.presets.preset(args.preset).vocab
    ids = torch.randint(0, vocab, (args.batch, args.sequence + 1), device=device)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    loss = on_torch.chunked_loss if args.loss == "chunked" else on_torch.summed_loss

    parameters = sum(p.numel() for p in state.model.parameters())
    about = {"parameters": parameters, "ready_s": ready, "staging": plan.staging}
    return [{"clip": clip, **about, **timed(state, batch, loss, clip, args)} for clip in args.clip]


def timed(
    state: on_torch.State, batch: dict[str, torch.Tensor], loss: LossFunction, clip: float, args: argparse.Namespace
) -> dict[str, object]:
    """The step time over several consecutive steps, with the memory used."""

    def step() -> float:
        if args.update == "none":
            value = sum(_forward_backward(state, batch, loss) for _ in range(args.accumulate))
            state.optimizer.zero_grad()
            return float(value)
        return on_torch.train_step(state, [batch] * args.accumulate, loss=loss, clip=clip or None).numbers()[0]

    for _ in range(args.warm):
        last = step()
    _reset(state.device)
    start = time.perf_counter()
    for _ in range(args.steps):
        last = step()
    ended = time.perf_counter()
    state.flush()
    _wait(state.device)
    seconds, flush = (ended - start) / args.steps, time.perf_counter() - ended
    tokens = args.batch * args.sequence * args.accumulate
    return {"step_s": seconds, "flush_s": flush, "tokens_s": tokens / seconds, "last_loss": last, **_memory(state)}


def _forward_backward(state: on_torch.State, batch: dict[str, torch.Tensor], loss: LossFunction) -> float:
    value = loss(state.model, batch)
    (value / batch["labels"].numel()).backward()
    return float(value.detach())


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory(state: on_torch.State) -> dict[str, object]:
    """Memory by home. The host's resident memory is as the kernel counts it."""
    found: dict[str, object] = {"host_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)}
    if state.device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    if state.offload:
        memory = state.offload.memory
        found |= {"arena_gib": memory.arena.nbytes / GIB, "cpu_share": _cpu_share(state)}
        if memory.state_file:
            found |= {"disk": bytes_text(memory.state_file.file.nbytes), "read_gib": memory.state_file.read_bytes / GIB}
    return found


def _cpu_share(state: on_torch.State) -> float:
    lanes = [p.lane for a in state.offload.units for p in a.pieces]
    return lanes.count("cpu") / max(1, len(lanes))


def main() -> None:
    args = arguments()
    shown = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if v is not None}
    for found in [measure_floors(args)] if args.what == "floors" else run_case(args):
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
        print(json.dumps({"torch": torch.__version__, **shown, **rounded}), flush=True)
    on_torch.finish()


if __name__ == "__main__":
    main()
