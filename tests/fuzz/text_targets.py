"""Fuzz targets for files that people write: plans, recipes, clusters, token indexes, chats, chat templates, documents and
Hugging Face configs. `command_lines` has the command line.
"""

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fullshard import Cluster, Home, Plan
from fullshard.base.errors import FullshardError
from fullshard.cluster.topology import NOMINAL
from fullshard.data import Batches, TokenFile, TokenWriter
from fullshard.data import templates as chat_templates
from fullshard.data.chat import conversation
from fullshard.data.pack_tokens import pack
from fullshard.data.templates import Template
from fullshard.model import presets
from fullshard.planner.strategies import zero3
from fullshard.runs.recipe.recipe import load_recipe
from tests.fuzz import mutate
from tests.fuzz.command_lines import COMMAND_LINES
from tests.fuzz.harness import Target

MiB = 1 << 20


# -- plans and clusters ------------------------------------------------------------------------------------


@cache
def plans() -> list[dict[str, Any]]:
    small, large = presets.describe("llama-nano"), presets.describe("llama-125m")
    homes = [Home(), Home("host", "disk", "host")]
    made = [zero3(model, devices=8, home=home) for model in (small, large) for home in homes]
    return [plan.to_dict() for plan in made] + [{**made[0].to_dict(), "version": 1}]


def make_plan(random: Random, directory: Path) -> Path:
    path = directory / "plan.json"
    path.write_bytes(mutate.written(mutate.dump(random, mutate.tree(random, random.choice(plans())))))
    return path


def run_plan(path: Path) -> None:
    plan = Plan.load(path)
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan)
    assert hash(plan)
    plan.diff(Plan.from_dict(plans()[0]))
    plan.change("*", remat="full")


@cache
def clusters() -> list[dict[str, Any]]:
    measured = {
        "machine": "m", "dtype": "bf16", "memory": 10**11, "hbm": 1e12, "launch": 1e-6, "notes": ["a"], "disk": 10**11,
        "gemms": [{"m": 8, "n": 8, "k": 8, "seconds": 1e-6}, {"m": 80, "n": 80, "k": 80, "seconds": 1e-5}],
        "attention": [{"width": 64, "sequence": 128, "forward": 1e12, "backward": 1e12}],
        "collectives": [{"kind": "all_gather", "ranks": 2, "nodes": 1, "latency": 1e-6, "bandwidth": 1e9}],
    }  # fmt: skip
    named = [Cluster.named(name).to_dict() for name in ("8xh100", "12xmi300x", "1xcpu")]
    return [*named, *({**data, "measured": measured} for data in named)]


def make_cluster(random: Random, directory: Path) -> Path:
    path = directory / "cluster.json"
    path.write_bytes(mutate.written(mutate.dump(random, mutate.tree(random, random.choice(clusters())))))
    return path


def run_cluster(path: Path) -> None:
    found = Cluster.load(path)
    assert Cluster.from_json(found.to_json()) == found
    assert str(found)
    for quantity in NOMINAL:
        assert found.of(quantity) > 0
    for dtype in ("bf16", "fp32"):
        found.gemm_rate(1e9, dtype)
        found.attention_rate(4096, 128, dtype)


# -- recipes -----------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "model": {"name": "llama-nano", "weights": "draw"},
    "data": {"path": "tokens", "sequence": 64, "boundaries": "labels", "packing": "whole"},
    "optim": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "clip": 1.0},
    "train": {"steps": 10, "global_batch": 8, "micro_batch": 2},
    "schedule": {"kind": "wsd", "warmup": 2, "decay": 3},
    "plan": {"strategy": "zero3", "compute": "bf16"},
    "home": {"optimizer": "disk", "staging": 3},
    "disk": {"path": "/scratch"},
    "lora": {"rank": 4, "targets": ["q_proj"]},
    "checkpoint": {"every": 5, "keep": 2, "best": 1, "metric": "loss"},
}
OVERRIDES = ("{s}.{k}={v}", "{s}.{k}", "{s}={v}", "{k}={v}", "{s}.{k}.{k}={v}", "{s}..{k}={v}", " {s} . {k} = {v}", "={v}", "{v}")


def toml(value: Any) -> str:
    """A value as TOML, as far as TOML can express it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if value in (mutate.DIGITS, mutate.DEEP):
        return "9" * 5000 if value == mutate.DIGITS else "[" * 3000
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def make_recipe(random: Random, directory: Path) -> tuple[Path, list[str]]:
    tree = mutate.tree(random, RECIPE, random.choice((0, 1, 1, 2, 4)))
    tables = tree.items() if isinstance(tree, dict) else [("x", tree)]
    text = "\n".join(
        f"[{name}]\n" + "\n".join(f"{k} = {toml(v)}" for k, v in table.items())
        if isinstance(table, dict)
        else f"{name} = {toml(table)}"
        for name, table in tables
    )
    path = directory / "recipe.toml"
    path.write_bytes(mutate.written(mutate.text(random, text) if random.random() < 0.2 else text))
    section = random.choice(list(RECIPE))
    fill = {"s": section, "k": random.choice(list(RECIPE[section])), "v": toml(random.choice(mutate.VALUES))}
    return path, [form.format(**fill) for form in mutate.some(random, OVERRIDES, 2)]


def run_recipe(given: tuple[Path, list[str]]) -> None:
    recipe = load_recipe(*given)
    assert recipe.model_dump_json()
    assert recipe.steps > 0


# -- token files -------------------------------------------------------------------------------------------


@cache
def token_files(vocab: int, marked: bool) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        with TokenWriter(Path(directory, "x"), vocab, "bytes", shard_tokens=40) as writer:
            for n in range(1, 14):
                writer.add(list(range(n)), [1, *[0] * (n - 1)] if marked else None)
        return {file.name: file.read_bytes() for file in Path(directory, "x").iterdir()}


def make_tokens(random: Random, directory: Path) -> Path:
    path = directory / "tokens"
    path.mkdir()
    for name, data in token_files(random.choice((256, 300, 70_000)), random.random() < 0.5).items():
        (path / name).write_bytes(data)
    (directory / "outside.tokens").write_bytes(b"secret")
    index = path / "index.json"
    if random.random() < 0.8:
        made = mutate.dump(random, mutate.tree(random, json.loads(index.read_text())))
        index.write_bytes(mutate.written(made.replace("00000", random.choice(("00000", "00000", "../outside", "00001", "")))))
    else:
        file = random.choice(sorted(path.glob("0*")))
        file.write_bytes(mutate.damaged(random, file.read_bytes()))
    return path


def run_tokens(path: Path) -> None:
    found = TokenFile(path)
    found.read(0, len(found))
    found.read_answers(0, len(found))
    batches = Batches(found, 4, 2, boundaries="attention", packing="whole")
    next(iter(batches))
    found.verify()


# -- conversations and templates ---------------------------------------------------------------------------

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = [
    chat_templates.CHATML,
    CHATML,
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant speak') }}{% endif %}{% endfor %}",
    "{% macro say(m) %}{{ m.role }}: {{ m.content | default('') }}\n{% endmacro %}"
    "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{%- set ns = namespace(n=0) %}{% for m in messages %}"
    "{%- set ns.n = ns.n + 1 %}{{ say(m) }}{% endfor %}{{ ns.n }}",
]
PIECES = [
    "{{ 1 / 0 }}", "{% break %}", "{% continue %}", "{{ range(10**9) | list }}", "{{ 'a' * 10**9 }}", "{{ 'a' * 10**6 }}",
    "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{{ messages.append(1) }}", "{{ messages[99].content }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ '%1000000000d' % 1 }}", "{{ '{:>999999999}'.format(1) }}",
    "{% generation %}", "{% endgeneration %}", "{% generation %}x{% endgeneration %}", "{{ '\\ud800' }}", "{{ messages }}",
    "{% for m in messages %}{{ loop(m) }}{% endfor %}", "{% include 'x' %}", "{% import 'os' as os %}", "{% extends 'x' %}",
    "{{ lipsum(3) }}", "{{ self }}", "{{ 10 ** 5000 }}", "{% set messages = 1 %}", "{{ messages | tojson | length }}",
    "{% filter upper %}", "{% endfilter %}", "{% raw %}", "{% if %}", "{{ x.y.z }}", "{{ 'a' | attr('__class__') }}",
    "{% set x = [1] %}{% for i in range(40) %}{% set x = [x, x] %}{% endfor %}{{ x }}", "{{ 'a' | center(10**10) }}",
    "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
]  # fmt: skip
SLOW = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
]
RECORD = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
        {"role": "user", "content": [{"type": "text", "text": "More?"}]},
        {"role": "assistant", "content": "no"},
    ],
    "tools": [{"name": "f"}],
    "system": "You help.",
}
OTHERS = [
    {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
    {"prompt": "1+1?", "completion": "2", "tools": '[{"name": "f"}]'},
    {"instruction": "Add", "input": "1 1", "output": "2"},
]


def make_chat(random: Random, directory: Path) -> tuple[Template, str | None, dict[str, Any]]:
    _shorten_timeout()
    record = mutate.tree(random, random.choice((RECORD, RECORD, *OTHERS)))
    source = random.choice(TEMPLATES)
    field = random.choice((None, None, None, "messages", "chosen", ""))
    return Template(source, "T", {"bos_token": "<s>", "eos_token": "</s>"}), field, record if isinstance(record, dict) else {}


def make_template(random: Random, directory: Path) -> tuple[Template, str | None, dict[str, Any]]:
    _shorten_timeout()
    source = random.choice(TEMPLATES)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(source) + 1)
        piece = random.choice(SLOW) if random.random() < 0.002 else random.choice(PIECES)
        source = source[:at] + piece + source[at:] if random.random() < 0.6 else mutate.text(random, source)
    return Template(source, "T", {"bos_token": "<s>"}), None, RECORD


def run_chat(given: tuple[Template, str | None, dict[str, Any]]) -> None:
    template, field, record = given
    text, answers = conversation(template, field, "here:1", record)
    edges = [edge for span in answers or () for edge in span]
    assert edges == sorted(edges)
    assert not edges or 0 <= edges[0] <= edges[-1] <= len(text)
    text.encode()


def _shorten_timeout() -> None:
    """Limit each conversation to one second of CPU time, so that slow ones do not take the whole run."""
    if chat_templates.SECONDS != 1:
        chat_templates.renderer().close()
        chat_templates.SECONDS = 1


# -- documents ---------------------------------------------------------------------------------------------


@cache
def parquet() -> list[bytes]:
    import io

    import pyarrow
    from pyarrow import parquet

    made = []
    for options in ({}, {"compression": "zstd"}, {"use_dictionary": False, "write_page_checksum": True}):
        file = io.BytesIO()
        parquet.write_table(pyarrow.table({"text": [f"word {i} " * 9 for i in range(50)], "id": range(50)}), file, **options)
        made.append(file.getvalue())
    return made


def make_documents(random: Random, directory: Path) -> tuple[Path, str | None, Path]:
    kind = random.choice(("jsonl", "jsonl", "parquet", "txt"))
    path, field = directory / f"a.{kind}", random.choice((None, None, "text", "id", "", "nothing"))
    if kind == "jsonl":
        lines = [mutate.dump(random, mutate.tree(random, {"text": "é " * 9, "meta": {"id": [1, 2]}}, i % 3)) for i in range(4)]
        path.write_bytes(mutate.written(random.choice(("\n", "\n", "\r\n", "\r", "\n\n", "\0")).join(lines)))
    elif kind == "parquet":
        path.write_bytes(mutate.damaged(random, random.choice(parquet())))
    else:
        path.write_bytes(mutate.damaged(random, "some téxt\nof lines\r\n".encode() * random.choice((1, 50))))
    return path, field, directory / "out"


def run_documents(given: tuple[Path, str | None, Path]) -> None:
    path, field, output = given
    try:
        made = pack([path], output, field=field, workers=1)
    except FullshardError:
        assert os.listdir(path.parent) == [path.name]  # nothing half-written
        raise
    made.verify()


# -- Hugging Face configs ----------------------------------------------------------------------------------


@cache
def configs() -> list[dict[str, Any]]:
    """Tiny configs of several families. Builds one model of each, so that no case pays for imports."""
    import transformers
    from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

    from fullshard.on_torch.model import hf_config

    hf_config.MAX_MODULES = 400
    transformers.logging.set_verbosity_error()
    common = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    made = [
        LlamaConfig(**common, num_hidden_layers=2, max_position_embeddings=32),
        Qwen2Config(**common, num_hidden_layers=2, max_position_embeddings=32),
        MixtralConfig(**common, num_hidden_layers=1, num_local_experts=2, max_position_embeddings=32),
        GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    ]
    found = [json.loads(config.to_json_string(use_diff=False)) for config in made]
    with tempfile.TemporaryDirectory() as directory:
        for config in found:
            Path(directory, "config.json").write_text(json.dumps(config))
            run_config(directory)
    return found


KEYS = {
    "auto_map": {"AutoConfig": "code.Config"}, "_attn_implementation": "someone/kernel", "attn_implementation": "eager",
    "quantization_config": {"quant_method": "awq"}, "use_kernels": True, "_experts_implementation": "someone/kernel",
    "text_config": {"auto_map": {"AutoModel": "a--b.C"}}, "per_layer_config": {"0": {"hidden_size": 3}},
    "attribute_map": {"a": 1},
    "use_pretrained_backbone": True, "dtype": "nn", "model_type": "timm_wrapper", "sub_configs": {"a": 1}, "name_or_path": "a/b",
}  # fmt: skip


def make_config(random: Random, directory: Path) -> str:
    made = mutate.tree(random, random.choice(configs()))
    if isinstance(made, dict) and random.random() < 0.3:
        key = random.choice(list(KEYS))
        made[key] = KEYS[key]
    (directory / "config.json").write_bytes(mutate.written(mutate.dump(random, made)))
    (directory / "code.py").write_text("raise SystemExit('code of the config has run')\n")
    return str(directory)


def run_config(spec: str) -> None:
    from fullshard import on_torch

    model = on_torch.load_model(spec)
    assert all(p.is_meta for p in model.parameters())


TARGETS: list[Target] = [
    Target("plan", make_plan, run_plan, 48 * MiB),
    Target("recipe", make_recipe, run_recipe, 48 * MiB),
    Target("cluster", make_cluster, run_cluster, 48 * MiB),
    Target("token_index", make_tokens, run_tokens, 48 * MiB),
    Target("chat", make_chat, run_chat, 48 * MiB),
    Target("template", make_template, run_chat, 96 * MiB),
    Target("data_sources", make_documents, run_documents, 256 * MiB),
    Target("hf_config", make_config, run_config, 256 * MiB),
    *COMMAND_LINES,
]
assert np  # imported before any case is measured, because token files need it
