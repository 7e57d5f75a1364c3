"""Play seeds: `python -m tests.fuzz.orders --seeds 1000`. One that is wrong: `--start 17 --seeds 1 --actions 0,3,5`."""

import argparse
import re
import sys
import time
from collections import Counter

from tests.cpu.ranks import Ranks
from tests.fuzz.orders.draw import draw_case
from tests.fuzz.orders.runner import chosen, play, shrink


def main() -> None:
    given = _arguments()
    pools: dict[int, Ranks] = {}
    ranks = lambda world: pools.setdefault(world, Ranks(world))
    refusals: Counter[str] = Counter()
    wrong, played, began = [], 0, time.monotonic()
    for seed in range(given.start, given.start + given.seeds):
        case = draw_case(seed)
        if given.world and any(leg.world != given.world for leg in case.legs):
            continue
        if given.actions is not None:
            case = chosen(case, given.actions)
        if given.show:
            print(case, flush=True)
        result, played = play(case, ranks), played + 1
        refusals.update(re.sub(r"[\d.]+", "N", r) for r in result.refusals)
        if played % 25 == 0:
            print(f"{played} cases to seed {seed} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if result.wrong:
            wrong.append(seed)
            short, left = shrink(case, result.wrong, ranks) if given.shrink else (case, result.wrong)
            print(f"{result.wrong}\n{short}\n  so short: {left}\n", flush=True)
    for sentence, count in refusals.most_common():
        print(f"refused {count} times: {sentence}")
    print(f"{played} cases in {time.monotonic() - began:.0f} s, {len(wrong)} wrong: {', '.join(map(str, wrong)) or 'none'}")
    for pool in pools.values():
        pool.stop()
    sys.exit(1 if wrong else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.orders", description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--world", type=int, help="only cases on so many ranks")
    parser.add_argument("--actions", type=lambda text: {int(n) for n in text.split(",")}, help="only these, by their numbers")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="leave out what is not needed")
    parser.add_argument("--show", action="store_true", help="print each case before it is played")
    return parser.parse_args()


if __name__ == "__main__":
    main()
