"""Initial values are those of one program for the whole model, but no process ever holds more than its part of it."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import fullshard as fs
from fullshard import on_jax
from fullshard.on_jax.model.built_in import NnxGPT, NnxLlama, NnxLlamaSize
from fullshard.on_jax.model.initial_values import ArrayPrograms, init_rngs
from tests.jax.test_on_jax import GPT, LLAMA

PADDED = NnxLlamaSize(**vars(replace(LLAMA, tied=True)), padding=3, attention_dropout=0.1)
MEMORY = """
import sys
import jax
import fullshard as fs
from fullshard import on_jax
from fullshard.model.presets import LlamaSize
from fullshard.on_jax.ranks import processes
from fullshard.on_jax.model.built_in import NnxLlama

def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

def shard(layers):
    make = lambda rngs: NnxLlama(LlamaSize(512, layers, 8, 8, 1024, 64, 128), rngs=rngs)
    described = on_jax.describe(make)
    return described.numel, on_jax.shard(make, fs.zero3(described, devices=8))

processes.start()
first = shard(1)  # programs are compiled
before = kilobytes("VmRSS")
numel, state = shard(24)
print((kilobytes("VmHWM") - before) * 1024 / (4 * numel))
processes.finish()
"""


@pytest.mark.parametrize(
    "make", [lambda rngs: NnxGPT(replace(GPT, dropout=0.1), rngs=rngs), lambda rngs: NnxLlama(PADDED, rngs=rngs)]
)
def test_values_and_keys_are_those_of_one_program(make):
    state = on_jax.shard(make, fs.zero3(on_jax.describe(make), devices=8), seed=3)
    whole = jax.jit(lambda key: nnx.split(make(nnx.Rngs(key)), nnx.Param, ...)[1:])(jax.random.key(3))
    _, params, rest = nnx.split(state.model, nnx.Param, ...)
    assert len(jax.tree.leaves(rest)) > 2
    for one, found in zip(jax.tree.leaves(whole), jax.tree.leaves((params, rest)), strict=True):
        plain = jax.random.key_data if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key) else np.asarray
        assert np.array_equal(plain(one), plain(found))


def test_equal_blocks_share_their_programs():
    counts = []
    for layers in (1, 5):
        size = replace(LLAMA, layers=layers)
        make = lambda key, size=size: nnx.state(NnxLlama(size, rngs=init_rngs(key)), nnx.Param)
        programs, numbers = ArrayPrograms.of(make, jax.random.key(0))
        shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        arrays = [programs.array(number, shardings) for number in jax.tree.leaves(numbers)]
        counts.append(len(programs.compiled))
    assert counts[0] == counts[1] < len(arrays) // 5
    assert len({float(a.sum()) for a in arrays if a.shape == (64, 32)}) == 2 * 5 + 2  # gates, ups, table and head all differ


@pytest.mark.full
@pytest.mark.parametrize(("processes", "least", "most"), [(1, 0.9, 1.5), (2, 0.4, 0.8)])
def test_a_process_holds_no_more_than_its_part_of_the_model(processes, least, most):
    """The peak of a process's memory over what it had before, in models: its shards, and what one array takes to compute. One
    program for the whole model peaks at more than 2."""
    assert all(least < peak < most for peak in peaks(processes))


def peaks(processes: int) -> list[float]:
    """Of processes that have eight devices together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={8 // processes} --xla_backend_optimization_level=0"
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "XLA_FLAGS")}
    shared = {**kept, "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1), "XLA_FLAGS": flags}
    shared |= {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-c", MEMORY]
    started = [
        subprocess.Popen(line, env={**shared, "RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(processes)
    ]
    said = [p.communicate(timeout=300) for p in started]
    assert all(p.returncode == 0 for p in started), said[0][1]
    return [float(out) for out, _ in said]
