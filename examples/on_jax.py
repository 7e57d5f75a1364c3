"""Fully sharded training on JAX, step by step: mesh, shard, train, memory, selective and hybrid sharding, checks, a profile.

    python examples/on_jax.py                                        # eight simulated devices if there is no accelerator
    python examples/on_jax.py --dim 1024 --layers 16 --vocab 32000   # GPUs or TPUs

The model's code has no sharding in it. The plan says what is sharded, and the same plan runs on torch.
"""

import argparse
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"  # of CPUs, before JAX

import jax
import numpy as np

import fullshard as fs
from fullshard import on_jax
from fullshard.base.text import bytes_text, table
from fullshard.model.presets import LlamaSize
from fullshard.on_jax.model.built_in import NnxLlama


def main() -> None:
    args = arguments()
    devices = len(jax.devices())
    size = LlamaSize(args.dim, args.layers, heads=8, kv_heads=8, ffn=4 * args.dim, vocab=args.vocab, sequence=args.sequence)
    make = lambda rngs: NnxLlama(size, rngs=rngs)  # any function of nnx.Rngs that returns an nnx.Module
    described = on_jax.describe(make)  # shapes only, no memory
    shape = fs.Batch(micro_batch=args.rows, sequence=args.sequence)

    title("1. The mesh and the plan")
    plan = fs.zero3(described, devices=devices, batch=shape, remat="full")
    print(f"{devices} {jax.devices()[0].platform} devices\n\n{plan}")

    title("2. Shard: every device computes only its own part of the initial values")
    state = on_jax.shard(make, plan, fs.AdamW(lr=1e-3), seed=0)
    show_sharding(state)

    title("3. Train")
    for index in range(args.steps):
        step = on_jax.train_step(state, [batch(index, plan, args.vocab)], clip=1.0)
        print(f"  step {step.index}  loss {float(step.loss):.6f}  gradient norm {float(step.grad_norm):.4f}")
    print(f"the step was compiled {on_jax.compilations(state)} time")

    title("4. Memory of a device")
    analyze_memory(state, described, devices)
    print(f"\n{on_jax.memory_analysis(state, [batch(0, plan, args.vocab)])}")

    title("5. Selective and hybrid sharding: other plans, the same loss")
    plans = {
        "zero3": plan,
        "embedding and head whole": fs.mixed(described, devices=devices, replicate=["embed", "head"], batch=shape),
        "norms of blocks whole": fs.zero3(on_jax.describe(make, small=1000), devices=devices, batch=shape),
        "2 copies, sharded": fs.hybrid(described, replicate=2, shard=devices // 2, batch=shape),
        "sharded, × 2 tensor": fs.zero3(described, devices=devices, tensor=2, batch=doubled(shape)),
    }
    rows = [[name, str(p.mesh), *first_step(make, p, args.vocab)] for name, p in plans.items()]
    print(table(["plan", "mesh", "parameters", "optimizer", "first loss"], rows, right=(2, 3, 4)))

    title("6. Check: the collectives of the compiled step against the plan's schedule")
    state.check()  # every array lies as the plan says
    print(on_jax.check_collectives(state, [batch(0, plan, args.vocab)]))

    title("7. Profile")
    with jax.profiler.trace(args.profile):
        on_jax.train_step(state, [batch(0, plan, args.vocab)], clip=1.0).loss.block_until_ready()
    print(f"open {args.profile} in TensorBoard or xprof; operations carry the names of their units")


def show_sharding(state: on_jax.State) -> None:
    """The first block's parameters: their shapes, how they lie, and the part of one device."""
    rows = []
    for name, p in state.params.items():
        if ".layers." not in name or ".layers.0." in name:
            rows.append([name, shape_text(p.shape), str(tuple(p.sharding.spec)), shape_text(p.addressable_shards[0].data.shape)])
    print(table(["parameter", "shape", "sharded by", "one device has"], rows))
    print("\n".join(state.notes))


def analyze_memory(state: on_jax.State, described: fs.Description, devices: int) -> None:
    """Bytes of parameters, gradients and Adam's two moments in fp32: whole on every device, and sharded."""
    whole, held = 16 * described.numel, state.held_bytes()
    sharded = held["params"] + held["params"] + held["optimizer"]  # a gradient is as large as its parameter
    print(f"parameters: {described.numel:,}")
    print(f"replicated: {whole:,} bytes on each of {devices} devices")
    print(f"sharded: {sharded:,} bytes on each, {100 * (1 - sharded / whole):.1f}% less")


def first_step(make: on_jax.Factory, plan: fs.Plan, vocab: int) -> list[str]:
    """Bytes of one device, and the loss of a first step under a plan."""
    state = on_jax.shard(make, plan, fs.AdamW(lr=1e-3), seed=0)
    loss = on_jax.train_step(state, [batch(0, plan, vocab)], clip=1.0).loss
    return [*(bytes_text(n) for n in state.held_bytes().values()), f"{float(loss):.6f}"]


def batch(seed: int, plan: fs.Plan, vocab: int) -> dict[str, np.ndarray]:
    """Rows for all devices, in which a token is followed by one of the next four."""
    draw = np.random.default_rng(seed)
    shape = (plan.batch.micro_batch * plan.mesh.data, plan.batch.sequence + 1)
    ids = np.cumsum(draw.integers(1, 5, shape), axis=1) % vocab
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def doubled(shape: fs.Batch) -> fs.Batch:
    """Twice the rows: devices along a tensor axis of 2 share theirs."""
    return fs.Batch(2 * shape.micro_batch, shape.sequence)


def shape_text(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def title(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--rows", type=int, default=2, help="rows per device and step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", default="runs/examples/jax-profile", help="a directory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
