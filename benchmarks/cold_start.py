"""Time `fullshard train` to its first step, beside a plain script that imports, builds, shards and compiles the same.

    python -m benchmarks.cold_start                                     # 2 gloo ranks, CPU
    python -m benchmarks.cold_start --ranks 1 --preset llama-125m --compile --sequence 1024     # one GPU

The ranks of the plain script (`plain_start.py`) are started at once, without a launcher. A first start of each fills the caches
of bytecode and of compiled kernels and is not counted; then starts of both alternate. CPU seconds are those of all processes
until they end: other programs lengthen the wall time.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fullshard.data.pack_tokens import pack
from fullshard.model.presets import PRESETS, LlamaSize

PLAIN = Path(__file__).with_name("plain_start.py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-bytes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tree", default=".", help="the checkout whose fullshard is timed")
    return parser.parse_args()


def through_fullshard(args: argparse.Namespace, here: Path) -> Callable[[], list[subprocess.Popen[str]]]:
    plan = ["plan=zero3", f"plan.compile={str(args.compile).lower()}"]
    recipe = here / "recipe.toml"
    recipe.write_text(
        f'[model]\nname = "{args.preset}"\n[data]\npath = "{here / "tokens"}"\nsequence = {args.sequence}\n[optim]\nlr = 1e-3\n'
        f"[train]\nsteps = 1\nglobal_batch = {args.batch * args.ranks}\nmicro_batch = {args.batch}\nloss = 'plain'\n"
        "[checkpoint]\nfinal = false\nminutes = 0.0\n"
    )

    def start() -> list[subprocess.Popen[str]]:
        run = tempfile.mkdtemp(dir=here)
        line = [sys.executable, "-m", "fullshard", "train", str(recipe), *plan, "--ranks", str(args.ranks), "--run", run]
        return [begin(line, {"PYTHONPATH": str(Path(args.tree).resolve())}, args.tree)]

    return start


def by_hand(args: argparse.Namespace, here: Path) -> Callable[[], list[subprocess.Popen[str]]]:
    size = PRESETS[args.preset]
    assert isinstance(size, LlamaSize)
    numbers = [size.vocab, size.dim, size.layers, size.heads, size.kv_heads, size.ffn]
    line = [sys.executable, PLAIN, here / "tokens/00000.tokens", args.batch, args.sequence, args.compile, *numbers]

    def start() -> list[subprocess.Popen[str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(args.ranks)}
        return [begin(line, shared | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(args.ranks)]

    return start


def begin(line: list[object], own: dict[str, str], tree: str = ".") -> "subprocess.Popen[str]":
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(list(map(str, line)), env=os.environ | own, cwd=tree, stderr=pipe, stdout=nothing, text=True)


def timed(start: Callable[[], list[subprocess.Popen[str]]]) -> dict[str, float]:
    """Wall seconds to the first step, and CPU seconds of all processes until their end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    processes = start()
    said: list[str] = []
    stderr = processes[0].stderr
    assert stderr is not None
    for text in stderr:
        said.append(text)
        if text.startswith("step 1"):
            break
    else:
        sys.exit("".join(said))
    wall = time.perf_counter() - began
    for process in processes:
        process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = [u.ru_utime + u.ru_stime for u in (before, after)]
    return {"wall_seconds": wall, "cpu_seconds": used[1] - used[0]}


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as own:
        here = Path(own)
        pack(sorted(Path(json.__file__).parent.glob("*.py")), here / "tokens", workers=1)
        sides = {"plain": by_hand(args, here), "fullshard": through_fullshard(args, here)}
        times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for index in range(1 + args.rounds):
            for name, start in sides.items():
                found = timed(start)
                if index:
                    times[name].append(found)
    result: dict[str, dict[str, float]] = {}
    for clock in ("wall_seconds", "cpu_seconds"):
        result[clock] = {name: statistics.median(t[clock] for t in found) for name, found in times.items()}
        result[clock]["ratio"] = result[clock]["fullshard"] / result[clock]["plain"]
    from benchmarks.step_overhead import about

    print(json.dumps({"case": vars(args), **about(), **result, "times": times}, indent=1), flush=True)


if __name__ == "__main__":
    main()
