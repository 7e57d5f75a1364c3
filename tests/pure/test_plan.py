import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings

from fullshard import Batch, FullshardError, Home, Mesh, Plan, PlanError, Precision, Prefetch, Unit
from tests.pure.plans import neighbours, plans

some = settings(max_examples=40, deadline=None)


def unit(name: str = "a", **choices) -> Unit:
    return Unit(name, (f"m.{name}",), **choices)


def small(**parts) -> Plan:
    return Plan(**{"mesh": Mesh(shard=4), "units": (unit("embed"), unit("layers.0"), unit("layers.1")), **parts})


# -- a value ------------------------------------------------------------------------------------------


@given(plans())
@some
def test_round_trips(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_dict(plan.to_dict()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


@given(plans())
@some
def test_file_round_trip(tmp_path_factory, plan):
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)) == plan


@given(plans())
@some
def test_what_comes_back_is_of_the_same_types(plan):
    """`1 == True` and `"fp32" == StrEnum.fp32`: equality alone would not see a bool become an int."""
    back = Plan.from_json(plan.to_json())
    assert repr(back) == repr(plan)
    assert (hash(back), back.digest) == (hash(plan), plan.digest)


@given(neighbours())
@some
def test_the_digest_tells_plans_apart(pair):
    first, second = pair
    assert (first.digest == second.digest) == (first == second)


@pytest.mark.parametrize("seed", ["0", "1234"])
def test_digest_and_hash_are_the_same_in_every_process(seed):
    plan = small(precision=Precision("bf16", output="fp16"))
    script = "import sys; from fullshard import Plan; p = Plan.from_json(sys.stdin.read()); print(p.digest, hash(p))"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    run = subprocess.run(
        [sys.executable, "-c", script], input=plan.to_json(), env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [plan.digest, str(hash(plan))]


def test_the_digest_does_not_change_from_release_to_release():
    """Checkpoints name plans by it: a new value here orphans them, so a change must be meant."""
    assert small().digest == "66edab3cdb49226333d2e8f5722e016066f480dda9ab69305821a77f1f7949b2"


def test_plans_are_keys():
    assert len({small(), small(), small(compile=True)}) == 2


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (small(), "mesh"),
        (Mesh(), "shard"),
        (Home(), "params"),
        (Precision(), "compute"),
        (Batch(), "sequence"),
        (Prefetch(), "forward"),
        (unit(), "layout"),
    ],
)
def test_frozen(value, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, getattr(value, field))


def test_mesh_counts_devices():
    mesh = Mesh(replicate=2, shard=3, tensor=5)
    assert (mesh.devices, mesh.data, str(mesh)) == (30, 6, "2×3×5")


# -- what makes no sense is refused, by name ----------------------------------------------------------

REFUSED = [
    (lambda: Mesh(shard=0), "mesh.shard must be a positive integer, not 0"),
    (lambda: Mesh(replicate=-2), "mesh.replicate must be a positive integer, not -2"),
    (lambda: Mesh(tensor=True), "mesh.tensor must be a positive integer, not True"),
    (lambda: Mesh(shard=2.0), "mesh.shard must be a positive integer, not 2.0"),
    (lambda: Mesh(shard="4"), "mesh.shard must be a positive integer, not '4'"),
    (lambda: Home(params="hots"), "home.params must be one of device, host, disk, not 'hots'; did you mean 'host'?"),
    (lambda: Home(optimizer="gpu"), "home.optimizer must be one of"),
    (lambda: Home(activations=None), "home.activations must be one of"),
    (lambda: Precision(compute="bf61"), "precision.compute must be one of fp32, bf16, fp16, not 'bf61'; did you mean 'bf16'?"),
    (lambda: Precision(reduce="float32"), "precision.reduce must be one of"),
    (lambda: Precision(master="fp16"), "precision.master must be one of fp32, bf16, not 'fp16'"),
    (lambda: Precision(output="int8"), "precision.output must be one of"),
    (
        lambda: small(precision=Precision(output="bf16")),
        "precision.output = 'bf16' does not work with compute = master = 'fp32': the inputs of units are then not cast back; "
        "write compute = 'bf16', or leave output out",
    ),
    (
        lambda: small(precision=Precision("bf16", master="bf16", output="fp32")),
        "precision.output = 'fp32' does not work with compute = master = 'bf16': the inputs of units are then not cast back; "
        "write master = 'fp32', or leave output out",
    ),
    (lambda: Batch(micro_batch=0), "batch.micro_batch must be a positive integer, not 0"),
    (lambda: Batch(sequence=-1), "batch.sequence must be a positive integer, not -1"),
    (lambda: Batch(accumulate=False), "batch.accumulate must be a positive integer, not False"),
    (lambda: Batch(accumulate=2, sync="lst"), "batch.sync must be one of every, last, not 'lst'; did you mean 'last'?"),
    (lambda: Batch(sync="last"), "batch.sync = 'last' has no effect with batch.accumulate = 1"),
    (lambda: Prefetch(forward=0), "prefetch.forward must be a positive integer, not 0"),
    (lambda: Prefetch(backward=-1), "prefetch.backward must be a positive integer, not -1"),
    (lambda: Unit("", ("m",)), "unit.name must be a non-empty string, not ''"),
    (lambda: Unit("a", ()), "unit a: modules must be a non-empty tuple"),
    (lambda: Unit("a", ["m"]), "unit a: modules must be a non-empty tuple"),
    (lambda: Unit("a", "m"), "unit a: modules must be a non-empty tuple"),
    (lambda: Unit("a", (1,)), "unit a: modules must be a non-empty tuple"),
    (
        lambda: unit(layout="shard"),
        "unit a: layout must be one of replicated, optimizer, sharded, experts, not 'shard'; did you mean 'sharded'?",
    ),
    (lambda: unit(remat="ful"), "unit a: remat must be one of none, selective, full, not 'ful'; did you mean 'full'?"),
    (lambda: unit(home="host"), "unit a: home must be a Home, not 'host'"),
    (lambda: unit(reshard=1), "unit a: reshard = 1 must be at least 2 ranks; write True or False instead"),
    (lambda: unit(reshard=0), "unit a: reshard = 0 must be at least 2 ranks"),
    (lambda: unit(reshard="yes"), "unit a: reshard must be True, False or a number of ranks, not 'yes'"),
    (lambda: unit(layout="replicated"), "unit a: reshard = True has no effect with layout 'replicated'; write False"),
    (lambda: unit(layout="optimizer", reshard=2), "unit a: reshard = 2 has no effect with layout 'optimizer'; write False"),
    (lambda: small(units=(unit(reshard=3),)), "unit a: reshard = 3 must divide mesh.shard = 4 and be smaller than it"),
    (lambda: small(units=(unit(reshard=4),)), "unit a: reshard = 4 must divide mesh.shard = 4 and be smaller than it"),
    (lambda: small(mesh=(1, 2, 3)), "plan.mesh must be a Mesh, not (1, 2, 3)"),
    (lambda: small(precision="bf16"), "plan.precision must be a Precision, not 'bf16'"),
    (lambda: small(batch=4), "plan.batch must be a Batch, not 4"),
    (lambda: small(prefetch=2), "plan.prefetch must be a Prefetch, not 2"),
    (lambda: small(compile=1), "plan.compile must be true or false, not 1"),
    (lambda: small(staging=0), "plan.staging must be a positive integer, not 0"),
    (lambda: small(staging=2.0), "plan.staging must be a positive integer, not 2.0"),
    (
        lambda: small(staging=8),
        "staging = 8 has no effect: the optimizer state of every unit rests on the device; leave it out, or give a unit",
    ),
    (lambda: small(cpu_share=1.5), "plan.cpu_share must be a number from 0 to 1, not 1.5"),
    (lambda: small(cpu_share=True), "plan.cpu_share must be a number from 0 to 1, not True"),
    (
        lambda: small(cpu_share=0.5),
        "cpu_share = 0.5 has no effect: the optimizer state of every unit rests on the device; leave it out, or give a unit",
    ),
    (lambda: small(backlog=0), "plan.backlog must be a positive integer, not 0"),
    (
        lambda: small(backlog=8),
        "backlog = 8 has no effect: the optimizer state of every unit rests on the device; leave it out, or give a unit",
    ),
    (lambda: small(units=()), "plan.units must be a non-empty tuple of Unit"),
    (lambda: small(units=[unit()]), "plan.units must be a non-empty tuple of Unit"),
    (lambda: small(units=("a",)), "plan.units must be a non-empty tuple of Unit"),
    (lambda: small(units=(unit(), Unit("a", ("other",)))), "unit 'a' appears twice in the plan"),
    (lambda: small(units=(unit(), Unit("b", ("m.a",)))), "module 'm.a' appears twice in the plan"),
    (lambda: small(units=(Unit("b", ("x", "x")),)), "module 'x' appears twice in the plan"),
    (
        lambda: small(units=(unit(layout="optimizer", reshard=False),), batch=Batch(accumulate=2, sync="last")),
        "batch.sync = 'last' has no effect: layout 'optimizer' reduces after the last anyway; write 'every'",
    ),
    (
        lambda: small(units=(unit(layout="replicated", reshard=False),), prefetch=Prefetch(2, 1)),
        "prefetch (2 forward, 1 backward) has no effect: every unit of this plan is replicated",
    ),
]


@pytest.mark.parametrize(("build", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused(build, sentence):
    with pytest.raises(PlanError, match=re.escape(sentence)) as caught:
        build()
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_plan_error_is_the_one_error_to_catch():
    assert issubclass(PlanError, FullshardError)


def test_reshard_may_be_a_proper_divisor():
    assert small(units=(unit(reshard=2),)).units[0].reshard == 2


# -- what does not read is refused, by name -----------------------------------------------------------


def edited(edit) -> dict:
    data = json.loads(small().to_json())
    edit(data)
    return data


MISREAD = [
    (lambda d: d.update(version=6), "plan version 6 is not known here; this fullshard reads version 5"),
    (lambda d: d.pop("version"), "plan version None is not known here; this fullshard reads version 5"),
    (lambda d: d.update(version=3), "plan version 3 is not known here; this fullshard reads version 5"),
    (lambda d: d.pop("staging"), "plan lacks the key 'staging'"),
    (lambda d: d.update(precison={}), "plan has an unknown key 'precison'; did you mean 'precision'?"),
    (lambda d: d["mesh"].update(pipeline=2), "plan.mesh has an unknown key 'pipeline'"),
    (lambda d: d["batch"].update(micro_bach=2), "plan.batch has an unknown key 'micro_bach'; did you mean 'micro_batch'?"),
    (lambda d: d["units"][1].update(rank=0), "unit layers.0 has an unknown key 'rank'"),
    (lambda d: d["units"][1]["home"].update(param="disk"), "unit layers.0: home has an unknown key 'param'; did you mean"),
    (lambda d: d.pop("mesh"), "plan lacks the key 'mesh'"),
    (lambda d: d["prefetch"].pop("forward"), "plan.prefetch lacks the key 'forward'"),
    (lambda d: d["units"][0].pop("remat"), "unit embed lacks the key 'remat'"),
    (lambda d: d["units"][0].pop("name"), "unit 0 lacks the key 'name'"),
    (lambda d: d["units"][0]["home"].pop("params"), "unit embed: home lacks the key 'params'"),
    (lambda d: d.update(mesh=8), "plan.mesh must be an object, not 8"),
    (lambda d: d.update(units={}), "plan.units must be a list"),
    (lambda d: d.update(units=[]), "plan.units must be a non-empty tuple of Unit"),
    (lambda d: d["units"].insert(2, "embed"), "unit 2 must be an object, not 'embed'"),
    (lambda d: d["units"][0].update(home="host"), "unit embed: home must be an object, not 'host'"),
    (lambda d: d["units"][0].update(modules="m"), "unit embed: modules must be a non-empty tuple"),
    (lambda d: d["mesh"].update(shard=0), "mesh.shard must be a positive integer, not 0"),
]


@pytest.mark.parametrize(("edit", "sentence"), MISREAD, ids=[sentence for _, sentence in MISREAD])
def test_misread(edit, sentence):
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(edited(edit))
    assert str(caught.value).startswith(sentence)


def test_a_share_of_the_cores_travels_with_the_plan_and_changes_its_name():
    plain = small(units=(unit(home=Home(optimizer="host")),))
    given = dataclasses.replace(plain, cpu_share=1)
    assert Plan.from_json(given.to_json()) == given == dataclasses.replace(plain, cpu_share=1.0)
    assert given.digest != plain.digest
    assert plain.diff(given) == ["cpu_share: measured → 1"]
    assert "cpu_share  1 of the pieces are updated by the host's cores" in str(given)


def test_a_backlog_travels_with_the_plan_and_changes_its_name():
    plain = small(units=(unit(home=Home(optimizer="host")),))
    given = dataclasses.replace(plain, backlog=8)
    assert Plan.from_json(given.to_json()) == given
    assert given.digest != plain.digest
    assert plain.diff(given) == ["backlog: any → 8"]
    assert "backlog    8 pieces whose gradients wait for their update at most" in str(given)


def test_from_dict_leaves_its_argument_alone():
    data = edited(lambda d: None)
    Plan.from_dict(data)
    assert data == edited(lambda d: None)


@pytest.mark.parametrize(
    ("text", "sentence"), [("[]", "a plan is a JSON object, not list"), ("{", "not JSON: "), ("", "not JSON: ")]
)
def test_text_that_is_no_plan(text, sentence, tmp_path):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert str(caught.value).startswith(sentence)
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"{path}: {sentence}")


def test_missing_file(tmp_path):
    with pytest.raises(PlanError, match=r"^cannot read plan .*gone.json: No such file or directory$"):
        Plan.load(tmp_path / "gone.json")


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"weights\.bin"):
        Plan.load(tmp_path / "weights.bin")


@pytest.mark.parametrize("version", [True, 4.0])
def test_a_version_is_an_integer(version):
    with pytest.raises(PlanError, match="version"):
        Plan.from_dict({**small().to_dict(), "version": version})


# -- change -------------------------------------------------------------------------------------------


def test_change_by_wildcard():
    plan = small().change("layers.*", remat="full", home=Home("host"))
    assert [u.remat for u in plan.units] == ["none", "full", "full"]
    assert [u.home.params for u in plan.units] == ["device", "host", "host"]
    assert small().change("*", remat="none") == small()


def test_change_returns_a_new_plan():
    plan = small()
    plan.change("embed", remat="full")
    assert plan == small()


@pytest.mark.parametrize("layout", ["replicated", "optimizer"])
def test_change_of_layout_settles_reshard(layout):
    changed = small().change("embed", layout=layout)
    assert [(u.layout, u.reshard) for u in changed.units] == [(layout, False), ("sharded", True), ("sharded", True)]


@pytest.mark.parametrize(
    ("pattern", "choice", "sentence"),
    [
        ("block.*", {"remat": "full"}, "no unit matches 'block.*'; the units are embed, layers.0, layers.1"),
        ("Embed", {"remat": "full"}, "no unit matches 'Embed'"),
        ("embed", {"remta": "full"}, "a unit has no choice 'remta'; did you mean 'remat'? (known: layout, reshard, remat, home)"),
        ("embed", {"name": "x"}, "a unit has no choice 'name'"),
        ("embed", {"remat": "all"}, "unit embed: remat must be one of"),
        ("embed", {"layout": "replicated", "reshard": True}, "unit embed: reshard = True has no effect"),
        ("layers.1", {"reshard": 3}, "unit layers.1: reshard = 3 must divide mesh.shard = 4"),
    ],
)
def test_change_refuses(pattern, choice, sentence):
    with pytest.raises(PlanError) as caught:
        small().change(pattern, **choice)
    assert str(caught.value).startswith(sentence)


def test_outputs_of_another_dtype_where_nothing_follows():
    assert small(units=(unit("all"),), precision=Precision(output="bf16")).precision.output == "bf16"


# -- diff ---------------------------------------------------------------------------------------------

DIFFS = [
    (small(), []),
    (small(mesh=Mesh(2, 4, 1)), ["mesh.replicate: 1 → 2"]),
    (small(precision=Precision("bf16", output="fp16")), ["precision.compute: fp32 → bf16", "precision.output: None → fp16"]),
    (small(batch=Batch(2, 512, 8, "last")), [
        "batch.micro_batch: 1 → 2", "batch.sequence: 1024 → 512", "batch.accumulate: 1 → 8", "batch.sync: every → last",
    ]),
    (small(prefetch=Prefetch(backward=2)), ["prefetch.backward: 1 → 2"]),
    (small(compile=True), ["compile: false → true"]),
    (small().change("layers.*", remat="full"), ["layers.0 … layers.1 (2): remat: none → full"]),
    (small().change("layers.1", reshard=2), ["layers.1: reshard: True → 2"]),
    (small().change("embed", layout="replicated"), ["embed: layout: sharded → replicated", "embed: reshard: True → False"]),
    (small().change("embed", home=Home("host", "disk")), [
        "embed: home.params: device → host", "embed: home.optimizer: device → disk",
    ]),
    (small(units=(unit("embed"), unit("head"))), [
        "only in the first plan: layers.0 … layers.1 (2)", "only in the second plan: head",
    ]),
    (small(units=(Unit("embed", ("m.embed", "m.pos")), *small().units[1:])), ["embed: modules: m.embed → m.embed, m.pos"]),
]  # fmt: skip


@pytest.mark.parametrize(("other", "sentences"), DIFFS, ids=[s[0] if s else "equal" for _, s in DIFFS])
def test_diff(other, sentences):
    assert small().diff(other) == sentences


def test_staging_is_told_only_where_it_matters():
    away = small().change("embed", home=Home(optimizer="host"))
    assert away.diff(dataclasses.replace(away, staging=8)) == ["staging: 4 → 8"]
    assert "staging    8 pieces" in str(dataclasses.replace(away, staging=8))
    assert "staging" not in str(small())


@given(neighbours())
@some
def test_diff_is_empty_for_equal_plans_and_no_others(pair):
    first, second = pair
    assert (first.diff(second) == []) == (first == second)
    assert (second.diff(first) == []) == (first == second)


def test_diff_sees_the_order_of_units():
    assert small().diff(small(units=small().units[::-1])) != []


# -- for people ---------------------------------------------------------------------------------------

PRINTED = """\
mesh       2×4×1 = 8 devices (replicate × shard × tensor)
precision  compute bf16, reduce fp32, master fp32, output fp32
batch      2 × 512 tokens, 4 accumulated, gradients reduced after the last micro-batch
prefetch   1 forward, 2 backward
compile    each block
staging    4 pieces of optimizer state on the device at a time
digest     {digest}

units                    layout      gathered until                remat  home
───────────────────────  ──────────  ────────────────────────────  ─────  ──────────────────
embed                    replicated  always whole                  none   device
layers.0 … layers.1 (2)  sharded     end of forward                full   device
layers.2                 sharded     end of backward               none   host
layers.3                 sharded     end of forward, then 2 ranks  none   device
head                     optimizer   end of step                   none   device/disk/device"""


def test_printed():
    units = (
        unit("embed", layout="replicated", reshard=False),
        unit("layers.0", remat="full"),
        unit("layers.1", remat="full"),
        unit("layers.2", reshard=False, home=Home("host", "host", "host")),
        unit("layers.3", reshard=2),
        unit("head", layout="optimizer", reshard=False, home=Home(optimizer="disk")),
    )
    plan = Plan(Mesh(2, 4), units, Precision("bf16", output="fp32"), Batch(2, 512, 4, "last"), Prefetch(1, 2), True)
    assert str(plan) == PRINTED.format(digest=plan.digest[:12])


def test_printed_defaults():
    assert "compile    no\n" in str(small())
    assert "precision  compute fp32, reduce fp32, master fp32\n" in str(small())


@pytest.mark.parametrize(
    ("parameter", "owner"),
    [
        ("layers.1.mlp.weight", "one"),
        ("layers.10.mlp.weight", "ten"),  # not `layers.1`: names end at a dot
        ("layers.10.mlp.experts.weight", "experts"),  # the deepest module wins
        ("layers.2.weight", "root"),
        ("scale", "root"),
    ],
)
def test_unit_of(parameter, owner):
    units = [("root", ""), ("one", "layers.1"), ("experts", "layers.10.mlp.experts"), ("ten", "layers.10")]
    plan = Plan(Mesh(), tuple(Unit(name, (module,)) for name, module in units))
    assert plan.unit_of(parameter).name == owner


def test_unit_of_nothing():
    assert small().unit_of("elsewhere.weight") is None
