"""From a seed to a case."""

import random
from dataclasses import replace
from typing import Any

import fullshard as fs
from fullshard.plan.plan import Home
from tests.fuzz.orders.actions import draw_action
from tests.fuzz.orders.case import Action, Case, Leg, PlanChoice
from tests.fuzz.orders.toy import Shape

HOMES = (Home(), Home(optimizer="host"), Home("host", "host"), Home(optimizer="disk"), Home("disk", "disk"), Home("disk", "host"))
ELEMENTWISE = (("RMSprop", (("eps", 1e-2), ("momentum", 0.5))), ("NAdam", (("eps", 1e-3),)), ("Adagrad", (("eps", 1e-2),)))
WORLDS = (*[1] * 4, *[2] * 7, 4)


def draw_case(seed: int) -> Case:
    draw = random.Random(seed)
    optimizer = draw_optimizer(draw)
    attached = draw.random() < 0.15
    offloads = not attached and not isinstance(optimizer, fs.TorchOptimizer)
    legs, first = [], 0
    for count in draw.choice([(12,), (12,), (12,), (7, 5)]):
        legs.append(_draw_leg(draw, first, count, offloads=offloads))
        first += count
    compute = draw.choice(["fp32", "fp32", "bf16"])
    return Case(seed, draw_shape(draw), optimizer, compute, draw.random() < 0.5, attached, tuple(legs))


def _draw_leg(draw: random.Random, first: int, count: int, *, offloads: bool) -> Leg:
    world = draw.choice(WORLDS)
    plan = draw_plan(draw, world, offloads=offloads)
    actions: list[Action] = []
    for index in range(first, first + count):
        found = draw_action(draw, index)
        if found.name == "move":
            found = replace(found, choices={"plan": draw_plan(draw, world, offloads=offloads)})
        actions.append(found)
    return Leg(world, plan, tuple(actions))


def draw_shape(draw: random.Random) -> Shape:
    rare = lambda share: draw.random() < share
    frozen = draw.choice([None, None, None, "blocks.1", "embed", "bias", "lm_head", "up_proj"])
    return Shape(batch_norm=rare(0.4), tied=rare(0.3), counts=rare(0.2), masked=rare(0.5), frozen=frozen)


def draw_optimizer(draw: random.Random) -> Any:
    """Settings that do not enlarge rounding: gradients are not divided by what is smaller than `eps`."""
    decay_all = draw.random() < 0.7
    name, options = draw.choice(ELEMENTWISE)
    return draw.choice(
        [
            fs.AdamW(lr=1e-2, eps=1e-3, weight_decay=0.1, decay_all=decay_all),
            fs.AdamW(lr=2e-2, betas=(0.8, 0.9), eps=1e-3, decay_all=decay_all),
            fs.Adam(lr=1e-2, eps=1e-3, weight_decay=0.1, decay_all=decay_all),
            fs.SGD(lr=0.02, momentum=0.9, weight_decay=0.01, decay_all=decay_all),
            fs.SGD(lr=0.02, momentum=0.9, nesterov=True),
            fs.SGD(lr=0.1),
            fs.TorchOptimizer(name, lr=1e-2, options=options, decay_all=decay_all),
        ]
    )


def draw_plan(draw: random.Random, world: int, *, offloads: bool) -> PlanChoice:
    strategies = ["ddp", "zero1", "zero2", "zero2", "zero3", "zero3", "mixed"] + ["hybrid"] * (world > 1) + ["hpz"] * (world > 2)
    accumulate = draw.choice([1, 1, 2])
    homes = tuple(draw.choice(HOMES) for _ in range(draw.choice([1, 1, 2]))) if offloads and draw.random() < 0.5 else (Home(),)
    away = any(home != Home() for home in homes)
    strategy = draw.choice(strategies)
    return PlanChoice(
        strategy,
        homes,
        activations=draw.choice(["device"] * 5 + ["host", "disk"]),
        remat=draw.choice(["none", "none", "full", "selective"]),
        tensor=draw.choice([1, 1, 1, 2]) if world > 1 and strategy not in ("hpz", "hybrid") else 1,
        accumulate=accumulate,
        sync=draw.choice(["every", "last"]) if accumulate > 1 and strategy != "zero1" else "every",
        prefetch=draw.choice([1, 1, 2]) if strategy != "ddp" and (strategy, world) != ("hybrid", 2) else 1,
        share=draw.choice([0.0, 0.5, 1.0]) if away else None,
        backlog=draw.choice([None, None, 1]) if away else None,
    )
