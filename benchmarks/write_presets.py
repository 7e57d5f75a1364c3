"""Write the traced costs of the built-in presets to the package, so that planning them needs no torch.

    python -m benchmarks.write_presets [PRESET …]

With names, only those presets are traced, and the costs of the others stay as they are.
"""

import json
import lzma
import sys

import torch

from fullshard.model.costs import Trace, to_json
from fullshard.model.presets import PRESETS, SHIPPED
from fullshard.on_torch.model.built_in import build
from fullshard.on_torch.tracing.describe import describe


def traces(name: str) -> dict[tuple[str, str, str], Trace]:
    """Trace the preset `name`, in bf16 and fp32."""
    with torch.device("meta"):
        model = build(name)
    found: dict[tuple[str, str, str], Trace] = {}
    for compute in ("bf16", "fp32"):
        costs = describe(model, micro_batch=1, sequence=1, compute=compute).costs
        assert costs is not None
        assert costs.shape is None, name
        found |= costs.traces
    return found


def main() -> None:
    names = sys.argv[1:]
    kept = {} if not names else json.loads(lzma.decompress(SHIPPED.read_bytes()))
    rows = kept | {name: to_json(traces(name)) for name in names or PRESETS}
    SHIPPED.write_bytes(lzma.compress(json.dumps(rows, separators=(",", ":"), sort_keys=True).encode()))
    print(f"{SHIPPED}: {SHIPPED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
