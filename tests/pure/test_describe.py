import pytest
import torch
from torch import nn

from fullshard import FullshardError, on_torch, zero3
from fullshard.model.description import Description
from fullshard.on_torch import describe
from fullshard.on_torch.parallelize.forward_errors import early_notes
from fullshard.on_torch.parallelize.refuse import refuse
from tests.cpu import odd_models


@pytest.fixture(autouse=True)
def on_meta():
    with torch.device("meta"):
        yield


class Toy(nn.Module):
    """Has a forward, so that it can be a unit."""

    def forward(self, x):
        raise NotImplementedError


class Layer(Toy):
    """20 parameters in parts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 4, bias=False), nn.Linear(4, 3, bias=False)


class Experts(Toy):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(3))


class Model(Toy):
    """Whatever children and parameters it is given, in that order."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def stack(count: int = 2, kind: type = Layer) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(count))


def decoder(**more) -> Model:
    return Model(tokens=nn.Embedding(5, 2), layers=stack(), norm=nn.LayerNorm(2), out=nn.Linear(2, 5, bias=False), **more)


def tables() -> nn.ModuleList:
    return nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(4, 2)])


def linear() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def seen(description: Description) -> list[tuple]:
    return [(u.name, u.kind, u.modules) for u in description.units]


def blocks(description: Description) -> list[str]:
    return [u.name for u in description.units if u.kind == "block"]


def names(description: Description, unit: str) -> list[str]:
    (found,) = [u for u in description.units if u.name == unit]
    return [p.name for p in found.parameters]


# -- blocks are found by themselves -------------------------------------------------------------------


def test_embed_blocks_head():
    assert seen(describe(decoder())) == [
        ("embed", "embed", ("tokens",)),
        ("layers.0", "block", ("layers.0",)),
        ("layers.1", "block", ("layers.1",)),
        ("head", "head", ("norm", "out")),
    ]


def test_sizes_by_hand():
    description = describe(decoder())
    assert [u.numel for u in description.units] == [10, 20, 20, 4 + 10]
    assert (description.numel, description.nbytes, description.trainable) == (64, 256, 64)


FOUND = [
    ("a ModuleList", lambda: Model(layers=stack(3)), ["layers.0", "layers.1", "layers.2"]),
    ("a Sequential", lambda: nn.Sequential(Layer(), Layer(), linear()), ["0", "1", "2"]),
    ("a ModuleDict", lambda: Model(h=nn.ModuleDict({"a": Layer(), "b": Layer()})), ["h.a", "h.b"]),
    ("deep inside", lambda: Model(a=Model(b=Model(layers=stack()))), ["a.b.layers.0", "a.b.layers.1"]),
    ("one layer", lambda: Model(tokens=nn.Embedding(5, 2), layers=stack(1)), ["layers.0"]),
    ("experts are inside a block", lambda: Model(layers=stack(2, Experts)), ["layers.0", "layers.1"]),
    ("experts of the one layer", lambda: Model(layers=stack(1, Experts)), ["layers.0"]),
    ("a row of linears", lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU()), ["0", "2"]),
    ("layers before linears", lambda: Model(mlp=nn.Sequential(linear(), linear()), layers=stack()), ["layers.0", "layers.1"]),
    ("tables do not repeat", lambda: Model(t=tables(), layers=stack()), ["layers.0", "layers.1"]),
    ("stages", lambda: Model(a=nn.Sequential(Layer(), Layer()), b=nn.Sequential(Layer(), Layer())), ["a.0", "a.1", "b.0", "b.1"]),
    ("no containers", lambda: Model(first=Layer(), act=nn.ReLU(), last=linear()), ["first", "last"]),
    ("no containers, wrapped", lambda: Model(net=Model(first=Layer(), last=linear())), ["net.first", "net.last"]),
]  # fmt: skip


@pytest.mark.parametrize(("build", "wanted"), [f[1:] for f in FOUND], ids=[f[0] for f in FOUND])
def test_found(build, wanted):
    assert blocks(describe(build())) == wanted


def test_an_encoder_decoder_has_a_middle():
    model = Model(tokens=nn.Embedding(5, 2), enc=stack(), enc_norm=nn.LayerNorm(2), dec=stack(), dec_norm=nn.LayerNorm(2))
    description = describe(model)
    assert blocks(description) == ["enc.0", "enc.1", "dec.0", "dec.1"]
    assert [s for s in seen(description) if s[1] != "block"] == [
        ("embed", "embed", ("tokens",)),
        ("middle", "middle", ("enc_norm",)),
        ("head", "head", ("dec_norm",)),
    ]


def test_the_middle_is_in_the_middle():
    model = Model(enc=stack(), norm=nn.LayerNorm(2), dec=stack())
    assert [u.name for u in describe(model).units] == ["enc.0", "enc.1", "middle", "dec.0", "dec.1"]


def test_a_parameter_of_the_model_itself_is_the_roots():
    description = describe(decoder(scale=parameter(7)))
    assert seen(description)[-1] == ("root", "root", ("",))
    assert names(description, "root") == ["scale"]


def test_a_parameter_around_the_blocks_is_the_roots():
    description = describe(Model(encoder=Model(layers=stack(), positions=parameter(3, 2))))
    assert names(description, "root") == ["encoder.positions"]


def test_a_module_alone():
    assert seen(describe(linear())) == [("root", "root", ("",))]


def test_an_embedding_among_the_children_says_so():
    description = describe(Model(tokens=nn.Embedding(3, 2), out=linear()))
    assert seen(description) == [("tokens", "embed", ("tokens",)), ("out", "block", ("out",))]


def test_a_block_used_twice_is_one_block():
    layer = Layer()
    description = describe(Model(layers=nn.ModuleList([layer, layer])))
    assert blocks(description) == ["layers.0"]
    assert description.numel == 20


def test_a_block_used_twice_can_be_sharded():
    layer = Layer()
    model = Model(layers=nn.ModuleList([layer, layer]))
    refuse(model, zero3(describe(model), 1))


@pytest.mark.parametrize("rule", [{"names": ["layers"]}, {"classes": ["ModuleList"]}])
def test_a_list_is_no_unit(rule):
    with pytest.raises(FullshardError, match=r"no module (is called|of class)"):
        describe(decoder(), **rule)


# -- modules that do not run, and parameters that are used while theirs do not -------------------------


def test_a_list_among_the_blocks_is_its_blocks():
    model = Model(layers=nn.ModuleList([stack(), stack()]))
    assert blocks(describe(model)) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_a_list_of_parameters_is_the_modules_around_it():
    model = Model(tables=Model(own=nn.ParameterList([parameter(3)])), layers=stack())
    assert seen(describe(model))[0] == ("embed", "embed", ("tables",))
    description = describe(decoder(own=nn.ParameterList([parameter(3)])))
    assert seen(description)[-1] == ("root", "root", ("",))
    assert names(description, "root") == ["own.0"]


def shown(model: nn.Module, **rule) -> Description:
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "labels": torch.zeros(2, 6, dtype=torch.int64)}
    loss = lambda model, batch: on_torch.Loss(model(batch["input_ids"]).logits.sum(), 1)
    return describe(model, example=batch, loss=loss, costs=False, **rule)


def test_a_weight_that_another_module_reads_is_the_roots():
    model = odd_models.UncalledTable()
    assert [u.name for u in describe(model).units][-1] == "head"
    description = shown(model)
    assert seen(description)[-1] == ("root", "root", ("",))
    assert names(description, "root") == ["positions.weight"]
    assert str(description).endswith("\n\nused outside its module: positions.weight, gathered by unit root")
    assert_each_once(model, description)
    note = "positions.weight: used outside the forward of its module, so gathered with the root for the whole forward"
    assert early_notes(model, zero3(description, 1)) == (note,)
    assert early_notes(model, zero3(describe(model), 1)) == ()
    assert early_notes(decoder(), zero3(describe(decoder()), 1)) == ()


def test_a_part_that_is_called_alone_is_a_unit():
    description = shown(odd_models.PartCalledAlone())
    assert seen(description)[1:3] == [
        ("blocks.0", "block", ("blocks.0",)),
        ("blocks.0.scale", "middle", ("blocks.0.scale",)),
    ]
    assert blocks(description) == [f"blocks.{i}" for i in range(5)]


def test_a_block_that_is_called_past_its_hooks_is_its_parts():
    model = odd_models.WithoutHooks()
    assert blocks(shown(model)) == [f"blocks.{i}.{part}" for i in range(5) for part in ("scale", "mix")]


@pytest.mark.parametrize("kind", odd_models.PLAIN)
def test_a_batch_changes_nothing_where_modules_run(kind):
    model = odd_models.PLAIN[kind]()
    assert seen(shown(model)) == seen(describe(model))
    assert shown(model).costs is None


def test_a_tied_weight_is_used_by_both_modules():
    model = odd_models.Stages()
    model.head.weight = model.embed.weight
    assert seen(shown(model))[0] == ("embed", "embed", ("embed", "head"))


class Reading(odd_models.UncalledTable):
    def body(self, x):
        return super().body(x) if x.sum().item() else x


def test_a_model_that_reads_values_is_run_if_it_has_some():
    with pytest.raises(FullshardError, match=r"Reading cannot be traced on this batch: .*if x.sum\(\).item\(\)"):
        shown(Reading())
    with torch.device("cpu"):
        model = Reading()
        model.register_buffer("seen", torch.zeros(1))
        model.register_forward_pre_hook(lambda module, args: module.seen.add_(1) and None)
        before = torch.get_rng_state()
        assert names(shown(model), "root") == ["positions.weight"]
        assert model.seen == 0
        assert torch.equal(before, torch.get_rng_state())


def test_a_batch_that_the_model_does_not_take_is_refused():
    model = odd_models.UncalledTable()
    model.positions = nn.Embedding(2, odd_models.WIDTH)
    with pytest.raises(FullshardError, match=r"UncalledTable cannot be traced on this batch: .* \(odd_models.py line \d+"):
        shown(model)


# -- tensors ------------------------------------------------------------------------------------------


def test_tied_units_become_one():
    model = decoder()
    model.out.weight = model.tokens.weight
    description = describe(model)
    assert seen(description)[0] == ("embed", "embed", ("tokens", "norm", "out"))
    assert [u.name for u in description.units] == ["embed", "layers.0", "layers.1"]
    assert names(description, "embed") == ["tokens.weight", "norm.weight", "norm.bias"]
    assert description.units[0].parameters[0].ties == ("out.weight",)
    assert description.numel == 54


def test_tied_blocks_become_one():
    model = decoder()
    model.layers[1].up.weight = model.layers[0].up.weight
    assert blocks(describe(model)) == ["layers.0"]
    assert describe(model).units[1].modules == ("layers.0", "layers.1")


def test_what_is_tied_to_the_root_is_the_roots():
    model = decoder(table=parameter(5, 2))
    model.out.weight = model.table
    description = describe(model)
    assert [u.name for u in description.units] == ["embed", "layers.0", "layers.1", "root"]
    assert names(description, "root") == ["table", "norm.weight", "norm.bias"]


def test_frozen():
    model = decoder()
    model.layers[0].requires_grad_(False)
    description = describe(model)
    assert [u.trainable for u in description.units] == [10, 0, 20, 14]
    assert description.trainable == 44
    assert "frozen: 20 of 64 parameters" in str(description)


def test_buffers():
    model = decoder(rotary=nn.Module())
    model.rotary.register_buffer("frequencies", torch.empty(3))
    model.layers[1].register_buffer("mask", torch.empty(2, 2, dtype=torch.bool), persistent=False)
    description = describe(model)
    assert [b.name for b in description.buffers] == ["rotary.frequencies"]
    assert [[b.name for b in u.buffers] for u in description.units] == [[], [], ["layers.1.mask"], []]
    mask = description.units[2].buffers[0]
    assert (mask.shape, mask.dtype, mask.trainable, mask.nbytes) == ((2, 2), "bool", False, 4)


def test_dtypes():
    model = decoder()
    model.layers.to(torch.bfloat16)
    model.out.to(torch.float64)
    description = describe(model)
    assert [sorted({p.dtype for p in u.parameters}) for u in description.units] == [
        ["fp32"],
        ["bf16"],
        ["bf16"],
        ["fp32", "fp64"],
    ]
    assert description.nbytes == 10 * 4 + 40 * 2 + 4 * 4 + 10 * 8
    assert "dtypes: bf16, fp32, fp64" in str(description)


def test_complex_buffers():
    model = decoder()
    model.register_buffer("freqs_cis", torch.empty(3, dtype=torch.complex64))
    assert describe(model).buffers[0].nbytes == 24


def test_nothing_is_changed():
    model = decoder()
    before = list(model.state_dict())
    describe(model)
    assert list(model.state_dict()) == before
    assert model.tokens.weight.is_meta


def test_the_title():
    assert (describe(decoder()).model, describe(decoder(), title="mine").model) == ("Model", "mine")


# -- blocks chosen by hand ----------------------------------------------------------------------------


def test_by_class():
    model = Model(layers=stack(2, Experts), out=linear())
    found = describe(model, classes=["Layer"])
    assert blocks(found) == [f"layers.{i}.experts.{j}" for i in (0, 1) for j in (0, 1, 2)]
    assert blocks(describe(model, classes=["Experts", "Layer"])) == ["layers.0", "layers.1"]  # outermost


def test_by_name():
    model = Model(layers=stack(3), out=linear())
    assert blocks(describe(model, names=["layers.*"])) == ["layers.0", "layers.1", "layers.2"]
    assert blocks(describe(model, names=["out", "layers.1"])) == ["layers.1", "out"]  # in the model's order
    assert blocks(describe(model, names=["*.0.up"])) == ["layers.0.up"]


def test_by_size():
    model = Model(small=nn.Linear(3, 1, bias=False), big=nn.Linear(5, 5, bias=False), pair=Layer())
    assert blocks(describe(model, min_params=20)) == ["big", "pair"]
    assert blocks(describe(model, min_params=12)) == ["big", "pair.down"]
    assert names(describe(model, min_params=20), "embed") == ["small.weight"]


def test_a_chosen_block_inside_another_keeps_its_own():
    description = describe(Model(layers=stack(2, Experts)), names=["layers.0", "layers.0.experts.1", "layers.1"])
    assert [u.numel for u in description.units] == [40, 20, 60]


REFUSED = [
    ({"classes": ["Layr"]}, "no module of class 'Layr'; did you mean 'Layer'? (the model has Embedding ×1, Layer ×2, "),
    ({"classes": ["Layer", "Conv2d"]}, "no module of class 'Conv2d'"),
    ({"names": ["layer.*"]}, "no module is called 'layer.*'"),
    ({"names": ["*.up"]}, "no module is called '*.up'"),  # a star stays between two dots
    ({"names": ["tokns"]}, "no module is called 'tokns'; did you mean 'tokens'? (the model has tokens, layers.0, "),
    ({"min_params": 41}, "no module has 41 parameters; the largest, layers.1, has 20"),
    ({"classes": ["Layer"], "min_params": 3}, "grouping takes one rule, not classes and min_params"),
    ({"classes": ["Layer"], "names": ["a"]}, "grouping takes one rule, not classes and names"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused(rule, sentence):
    with pytest.raises(FullshardError) as caught:
        describe(decoder(), **rule)
    assert str(caught.value).startswith(sentence)


def test_the_class_of_the_model_itself_is_refused():
    with pytest.raises(FullshardError, match="Model"):
        describe(decoder(), classes=["Model"])


def test_a_negative_size_is_refused():
    with pytest.raises(FullshardError, match="min_params"):
        describe(decoder(), min_params=-1)


def test_the_largest_module_is_one_that_could_be_a_unit():
    with pytest.raises(FullshardError, match=r"the largest, layers\.[01], has 20"):
        describe(decoder(), min_params=30)


def test_no_module_of_that_size_in_a_lone_module():
    with pytest.raises(FullshardError, match="no module has 100 parameters"):
        describe(linear(), min_params=100)


# -- every parameter is in exactly one unit -----------------------------------------------------------


def assert_each_once(model: nn.Module, description: Description) -> None:
    placed = [p.name for u in description.units for p in u.parameters]
    assert sorted(placed) == sorted(n for n, _ in model.named_parameters())
    assert description.numel == sum(p.numel() for p in model.parameters())
    assert len({u.name for u in description.units}) == len(description.units)
    plan = zero3(description, 1)
    owners = {p.name: u.name for u in description.units for p in u.parameters}
    assert {n: plan.unit_of(n).name for n, _ in model.named_parameters()} == owners


COMMON = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 44,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 6}
SMALL = {
    "LlamaForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Gemma2ForCausalLM": GROUPED,
    "GPT2LMHeadModel": {"n_embd": 24, "n_layer": 3, "n_head": 4, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2},
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "T5ForConditionalGeneration": {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 3, "num_heads": 4, "vocab_size": 50},
    "BertForMaskedLM": COMMON,
    "ViTForImageClassification": {**{k: COMMON[k] for k in list(COMMON)[:4]}, "image_size": 32, "patch_size": 8},
}
BLOCKS = {"T5ForConditionalGeneration": 6}  # an encoder and a decoder


def hugging_face(name: str) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**SMALL[name]))


@pytest.mark.parametrize("name", SMALL)
def test_each_parameter_is_in_one_unit(name):
    model = hugging_face(name)
    description = describe(model)
    assert_each_once(model, description)
    assert len(blocks(description)) == BLOCKS.get(name, 3)


@pytest.mark.parametrize(
    "rule", [{"min_params": 1000}, {"classes": ["Linear"]}, {"names": ["model.layers.1", "model.layers.*.mlp"]}]
)
def test_each_parameter_is_in_one_unit_of_a_chosen_grouping(rule):
    model = hugging_face("LlamaForCausalLM")
    assert_each_once(model, describe(model, **rule))


CLASHES = [
    (lambda: Model(pos=nn.Embedding(3, 2), embed=linear(), layers=stack()), {"names": ["embed", "layers.*"]}),
    (lambda: Model(layers=stack(), head=linear(), temperature=linear()), {"names": ["head", "layers.*"]}),
    (lambda: Model(root=linear(), leaf=linear(), scale=parameter(3)), {}),
]


@pytest.mark.parametrize(("build", "rule"), CLASHES, ids=["embed", "head", "root"])
def test_a_module_may_be_called_as_a_unit_is(build, rule):
    model = build()
    assert_each_once(model, describe(model, **rule))


# -- for people and programs --------------------------------------------------------------------------

PRINTED = """\
toy

unit                 kind      modules    parameters  bytes   share
───────────────────  ────────  ─────────  ──────────  ─────  ──────
embed                embed     tokens             10   40 B   15.6%
layers.0 … layers.1  block ×2  one each           40  160 B   62.5%
head                 head      norm, out          14   56 B   21.9%
total                4 units                      64  256 B  100.0%"""


def test_printed():
    assert str(describe(decoder(), title="toy")) == PRINTED


def test_notes():
    model = decoder()
    model.out.weight = model.tokens.weight
    assert str(describe(model)).endswith("\n\ntied: tokens.weight = out.weight")


def test_to_dict():
    data = describe(decoder(), title="toy").to_dict()
    assert {k: data[k] for k in ("model", "parameters", "trainable", "bytes", "buffers")} == {
        "model": "toy",
        "parameters": 64,
        "trainable": 64,
        "bytes": 256,
        "buffers": [],
    }
    assert data["units"][3] == {
        "name": "head",
        "kind": "head",
        "modules": ["norm", "out"],
        "parameters": 14,
        "trainable": 14,
        "bytes": 56,
        "share": 0.21875,
        "dtypes": ["fp32"],
        "tied": [],
        "buffers": [],
    }
