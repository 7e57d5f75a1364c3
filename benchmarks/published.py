"""Predict the published results that docs/accuracy.md lists, from nominal cluster numbers. Prints its table. Needs no GPU.

    python -m benchmarks.published

Rates are tokens a second of one device. torchtitan: Llama 3.1 8B on H100 of 96 GB and 500 W. MosaicML: llm-foundry's table of
MPT-7B. MaxText: seconds of a step, from the table of its repository.
"""

from dataclasses import dataclass
from functools import lru_cache

import fullshard as fs
from fullshard.cluster.topology import Cluster
from fullshard.model import presets
from fullshard.model.presets import GPTSize
from fullshard.planner.time.timeline import timeline

# LayerNorm, GELU, no biases in attention, the head tied to the embedding. Positions are learned here.
MPT = GPTSize(4096, 32, 32, 50_432, 2048, bias=False)


@dataclass(frozen=True)
class PublishedRow:
    """A published result: what was trained, on which cluster, and tokens a second of a device."""

    label: str
    model: str  # a preset, or mpt-7b
    cluster: str
    batch: tuple[int, int]
    published: float
    remat: str = "none"
    compile: bool = False


TITAN = "torchtitan, Llama 3.1 8B, {} H100 (96 GB, 500 W), 2 × 8192, selective"
ROWS = [
    PublishedRow(f"{TITAN.format(n)}{words}", "llama3-8b", f"{n}xh100e", (2, 8192), rate, "selective", bool(words))
    for n, words, rate in ((8, "", 5762), (8, ", compiled", 6667), (128, "", 5605), (128, ", compiled", 6514))
]
ROWS += [
    PublishedRow(f"MosaicML, MPT-7B, {n} H100, 6 × 2048", "mpt-7b", f"{n}xh100", (6, 2048), rate)
    for n, rate in ((8, 10_643), (128, 10_475), (256, 10_119), (512, 9_670))
]
ROWS += [
    PublishedRow(
        "MaxText, Llama 3 70B, 128 H100, 2 × 8192, full", "llama3-70b", "128xh100", (2, 8192), 2 * 8192 / 15.57, "full", True
    ),
    PublishedRow(
        "MaxText, Llama 2 70B, 64 H100, 2 × 4096, full", "llama2-70b", "64xh100", (2, 4096), 2 * 4096 / 6.999, "full", True
    ),
]


@lru_cache
def description(model: str) -> fs.Description:
    """The description of a preset; that of MPT-7B is traced."""
    if model != "mpt-7b":
        return presets.describe(model)
    import torch

    from fullshard import on_torch
    from fullshard.on_torch.model.built_in import GPT

    with torch.device("meta"):
        return on_torch.describe(GPT(MPT), title=model, micro_batch=1, sequence=2048)


@lru_cache
def predicted(row: PublishedRow) -> float:
    """Tokens a second of one device, by the planner."""
    found, where = description(row.model), Cluster.named(row.cluster)
    precision, batch = fs.Precision(compute="bf16"), fs.Batch(*row.batch)
    made = fs.zero3(found, devices=where.devices, precision=precision, batch=batch, remat=row.remat, compile=row.compile)
    return row.batch[0] * row.batch[1] / timeline(made, found, where, loss="plain").seconds


def main() -> None:
    print("| model, cluster | published | predicted | error |\n|---|---|---|---|")
    for row in ROWS:
        rate = predicted(row)
        error = f"{rate / row.published - 1:+.1%}".replace("-", "−")
        print(f"| {row.label} | {row.published:,.0f} | {rate:,.0f} | {error} |", flush=True)


if __name__ == "__main__":
    main()
