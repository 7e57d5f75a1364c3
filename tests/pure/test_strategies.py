import pytest

import fullshard as fs
from fullshard.model.description import Description, Tensor, UnitDescription
from fullshard.planner.strategies import STRATEGIES


def described(name: str, kind: str, numel: int) -> UnitDescription:
    return UnitDescription(name, kind, (f"model.{name}",), (Tensor(f"model.{name}.weight", (numel,)),))


TOY = Description(
    "toy",
    (
        described("embed", "embed", 100),
        *(described(f"layers.{i}", "block", 40) for i in range(4)),
        described("head", "head", 60),
    ),
)
NO_BLOCKS = Description("flat", (described("root", "root", 7),))


def choices(plan: fs.Plan) -> set:
    return {(u.layout, u.reshard) for u in plan.units}


# mesh: replicate, shard, tensor
NAMED = [
    ("ddp", {"devices": 8}, (8, 1, 1), ("replicated", False)),
    ("ddp", {"devices": 8, "tensor": 2}, (4, 1, 2), ("replicated", False)),
    ("zero1", {"devices": 8}, (1, 8, 1), ("optimizer", False)),
    ("zero2", {"devices": 8}, (1, 8, 1), ("sharded", False)),
    ("zero3", {"devices": 8}, (1, 8, 1), ("sharded", True)),
    ("zero3", {"devices": 8, "tensor": 4}, (1, 2, 4), ("sharded", True)),
    ("zero3", {"devices": 1}, (1, 1, 1), ("sharded", True)),
    ("hybrid", {"replicate": 2, "shard": 4}, (2, 4, 1), ("sharded", True)),
    ("hybrid", {"replicate": 2, "shard": 4, "tensor": 8}, (2, 4, 8), ("sharded", True)),
    ("hpz", {"devices": 16, "reshard": 8}, (1, 16, 1), ("sharded", 8)),
]


@pytest.mark.parametrize(("name", "arguments", "mesh", "choice"), NAMED)
def test_named(name, arguments, mesh, choice):
    plan = fs.strategy(name, TOY, **arguments)
    assert plan.mesh == fs.Mesh(*mesh)
    assert choices(plan) == {choice}
    assert plan == getattr(fs, name)(TOY, **arguments)


def test_every_strategy_is_named_and_exported():
    assert sorted(STRATEGIES) == ["ddp", "hpz", "hybrid", "mixed", "zero1", "zero2", "zero3"]
    assert all(getattr(fs, name) is function for name, function in STRATEGIES.items())


def test_units_are_those_of_the_description():
    plan = fs.zero3(TOY, 2)
    assert [(u.name, u.modules) for u in plan.units] == [(u.name, u.modules) for u in TOY.units]
    assert all(u.home == fs.Home() for u in plan.units)


def whole(plan: fs.Plan) -> list[str]:
    assert choices(plan) <= {("replicated", False), ("sharded", True)}
    return [u.name for u in plan.units if u.layout == "replicated"]


LAYERS = ["layers.0", "layers.1", "layers.2", "layers.3"]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"replicate_below": 41}, LAYERS),
        ({"replicate_below": 60}, LAYERS),  # the head has 60
        ({"replicate_below": 61}, [*LAYERS, "head"]),
        ({"replicate": ["embed"]}, ["embed"]),
        ({"replicate": ["embed", "layers.[01]"]}, ["embed", "layers.0", "layers.1"]),
        ({"replicate": ["embed"], "replicate_below": 41}, ["embed", *LAYERS]),
    ],
)
def test_mixed(rule, kept):
    plan = fs.mixed(TOY, 4, **rule)
    assert whole(plan) == kept
    assert plan.mesh == fs.Mesh(shard=4)


def test_replicate_below_leaves_out_its_own_size():
    with pytest.raises(fs.PlanError, match="replicate_below = 40 leaves every unit sharded; the smallest has 40 parameters"):
        fs.mixed(TOY, 4, replicate_below=40)


@pytest.mark.parametrize(
    ("every", "recomputed"),
    [(1, LAYERS), (2, ["layers.0", "layers.2"]), (3, ["layers.0", "layers.3"]), (9, ["layers.0"])],
)
def test_remat_is_for_blocks(every, recomputed):
    plan = fs.zero3(TOY, 2, remat="selective", remat_every=every)
    assert [u.name for u in plan.units if u.remat == "selective"] == recomputed
    assert {u.remat for u in plan.units if u.name not in recomputed} == {"none"}


def test_what_every_strategy_takes():
    common = {
        "precision": fs.Precision("bf16"),
        "batch": fs.Batch(2, 64),
        "prefetch": fs.Prefetch(2),
        "compile": True,
    }
    plan = fs.zero2(TOY, 4, **common)
    assert {name: getattr(plan, name) for name in common} == common
    plain = fs.zero2(TOY, 4)
    assert (plain.precision, plain.batch, plain.prefetch, plain.compile) == (fs.Precision(), fs.Batch(), fs.Prefetch(), False)


REFUSED = [
    (lambda: fs.strategy("zero4", TOY, devices=2), "unknown strategy 'zero4'; known are ddp, zero1, zero2, zero3, hybrid, hpz"),
    (lambda: fs.strategy("hybird", TOY, devices=2), "unknown strategy 'hybird'"),
    (lambda: fs.zero3(TOY, 0), "devices must be a positive integer, not 0"),
    (lambda: fs.ddp(TOY, "8"), "devices must be a positive integer, not '8'"),
    (lambda: fs.zero3(TOY, 8, tensor=3), "tensor = 3 must divide devices = 8"),
    (lambda: fs.ddp(TOY, 8, tensor=0), "tensor = 0 must divide devices = 8"),
    (lambda: fs.zero1(TOY, 8, tensor=16), "tensor = 16 must divide devices = 8"),
    (lambda: fs.hybrid(TOY, 0, 4), "mesh.replicate must be a positive integer, not 0"),
    (lambda: fs.hybrid(TOY, 2, 4, tensor=0), "mesh.tensor must be a positive integer, not 0"),
    (lambda: fs.hpz(TOY, 8, reshard=3), "unit embed: reshard = 3 must divide mesh.shard = 8"),
    (lambda: fs.hpz(TOY, 8, reshard=8), "unit embed: reshard = 8 must divide mesh.shard = 8 and be smaller than it"),
    (lambda: fs.mixed(TOY, 8), "mixed needs replicate_below (a parameter count) or replicate (unit names)"),
    (lambda: fs.mixed(TOY, 8, replicate=["lm_head"]), "mixed: no unit matches 'lm_head'; the units are embed, layers.0"),
    (lambda: fs.mixed(TOY, 8, replicate=["embed", "x*"]), "mixed: no unit matches 'x*'"),
    (lambda: fs.mixed(TOY, 8, replicate_below=101), "mixed: no unit is left to shard; write ddp, or keep fewer units whole"),
    (lambda: fs.mixed(TOY, 8, replicate=["embed"], replicate_below=61), "mixed: no unit is left to shard"),
    (lambda: fs.zero3(TOY, 8, remat="ful"), "unit layers.0: remat must be one of none, selective, full, not 'ful'"),
    (lambda: fs.zero3(TOY, 8, remat="full", remat_every=0), "remat_every must be a positive integer, not 0"),
    (lambda: fs.zero3(TOY, 8, remat_every=2), "remat_every has no effect with remat = 'none'"),
    (lambda: fs.zero3(NO_BLOCKS, 8, remat="full"), "remat = 'full' has no effect: no repeated blocks were found"),
    (lambda: fs.ddp(TOY, 8, prefetch=fs.Prefetch(2)), "prefetch (2 forward, 1 backward) has no effect"),
]


@pytest.mark.parametrize(("build", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused(build, sentence):
    with pytest.raises(fs.PlanError) as caught:
        build()
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_misspelt_argument_is_refused(name):
    own = {"hybrid": {"replicate": 2, "shard": 2}, "hpz": {"devices": 4, "reshard": 2}}.get(name, {"devices": 4})
    rule = {"replicate_below": 50} if name == "mixed" else {}
    with pytest.raises(fs.PlanError, match=r"^a strategy has no argument 'precison' .*; did you mean 'precision'\?$"):
        fs.strategy(name, TOY, **own, **rule, precison=fs.Precision())


def test_a_home_is_every_units_but_activations_leave_blocks_alone():
    plan = fs.zero3(TOY, devices=2, home=fs.Home("host", "disk", "host"), staging=2)
    assert [u.home for u in plan.units] == [
        fs.Home("host", "disk"),
        *[fs.Home("host", "disk", "host")] * 4,
        fs.Home("host", "disk"),
    ]
    assert plan.staging == 2
    with pytest.raises(fs.PlanError, match="home must be a Home, not 'host'"):
        fs.zero3(TOY, devices=2, home="host")
    with pytest.raises(fs.PlanError, match="no repeated blocks were found"):
        fs.zero3(NO_BLOCKS, devices=2, home=fs.Home(activations="host"))
