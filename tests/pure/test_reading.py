"""Untrusted files and documents: every kind of damage gives one sentence."""

import json
import os
import socket
import tracemalloc

import numpy as np
import pytest

from fullshard import Cluster, FullshardError, Plan
from fullshard.base.errors import LONGEST
from fullshard.base.reading import DEEPEST, parse_json, parse_toml, read_text
from fullshard.data import TokenFile, TokenWriter
from fullshard.data.pack_tokens import pack
from fullshard.data.tokenizer import open_tokenizer
from fullshard.runs.recipe.recipe import load_recipe

DEEP, DIGITS = "[" * 100_000, "9" * 5000


def sentence(call, *arguments) -> str:
    with pytest.raises(FullshardError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- files ----------------------------------------------------------------------------------------------------

LOADERS = {
    "plan": Plan.load,
    "cluster": lambda path: Cluster.load(path),
    "recipe": lambda path: load_recipe(path, []),
}


@pytest.mark.parametrize("what", LOADERS)
def test_only_plain_files_are_read(what, tmp_path):
    load = LOADERS[what]
    os.mkfifo(tmp_path / "pipe.json")
    assert sentence(load, tmp_path / "pipe.json").endswith("pipe.json: it is a pipe, not a plain file")
    for device in ("/dev/zero", "/dev/urandom"):
        assert sentence(load, device) == f"cannot read {what} {device}: it is a device, not a plain file"
    assert sentence(load, tmp_path / "gone.json").endswith("gone.json: No such file or directory")
    (tmp_path / "d.json").mkdir()
    assert sentence(load, tmp_path / "d.json").endswith("d.json: Is a directory")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s.json"))
        assert "cannot read" in sentence(load, tmp_path / "s.json")


@pytest.mark.parametrize("what", LOADERS)
def test_paths_that_are_none(what, tmp_path):
    load = LOADERS[what]
    assert "embedded null byte" in sentence(load, f"{tmp_path}/a\0.json")
    assert sentence(load, f"{tmp_path}/{'a' * 5000}.json").endswith("File name too long")
    assert "surrogates not allowed" in sentence(load, f"{tmp_path}/\ud800.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("what", LOADERS)
def test_a_file_that_may_not_be_read(what, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "a.json").chmod(0)
    assert sentence(LOADERS[what], tmp_path / "a.json").endswith("a.json: Permission denied")


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "a.toml").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file of a terabyte
    tracemalloc.start()
    said = sentence(load_recipe, tmp_path / "a.toml", [])
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert said.endswith("a.toml: it has more than the 1,048,576 bytes that a recipe may have")


def test_a_small_file_takes_little_memory(tmp_path):
    (tmp_path / "a").write_text("hello")
    tracemalloc.start()
    assert read_text(tmp_path / "a", "plan", 1 << 40) == "hello"
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


# -- documents ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (DEEP, f"it is nested deeper than {DEEPEST} levels"),
        ("[" * 102 + "]" * 102, f"it is nested deeper than {DEEPEST} levels"),
        ('{"a":' * 102 + "1" + "}" * 102, f"it is nested deeper than {DEEPEST} levels"),
        (DIGITS, "an integer has too many digits"),
        (b'"\xff"', "byte 1 is not UTF-8"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_what_is_not_json(text, why):
    assert sentence(parse_json, text, "here").startswith(f"here is not JSON: {why}")


def test_json_of_a_hundred_levels_is_read():
    assert parse_json("[" * 100 + "]" * 100, "here")
    assert parse_json(b'{"a": 1}', "here") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"x = {DEEP}", f"it is nested deeper than {DEEPEST} levels"),
        (f"x = {'[' * 102}{']' * 102}", f"it is nested deeper than {DEEPEST} levels"),
        (f"[{'.'.join('a' * 110)}]", f"it is nested deeper than {DEEPEST} levels"),
        (f"x = {DIGITS}", "an integer has too many digits"),
        (f"x = 0x{DIGITS}", "an integer does not fit in 64 bits"),
        (f"x = {2**63}", "an integer does not fit in 64 bits"),
        ("x = ", "Invalid value"),
    ],
)
def test_what_is_not_toml(text, why):
    assert sentence(parse_toml, text, "here").startswith(f"here is not TOML: {why}")


@pytest.mark.parametrize("hostile", [DEEP, DIGITS, f'{{"version": {DIGITS}}}', '{"a":' * 5000])
def test_plans_clusters_and_indexes_of_hostile_json(hostile, tmp_path):
    (tmp_path / "index.json").write_text(hostile)
    assert "not JSON" in sentence(Plan.load, tmp_path / "index.json")
    assert "not JSON" in sentence(Cluster.load, tmp_path / "index.json")
    assert "not JSON" in sentence(TokenFile, tmp_path)
    (tmp_path / "a.jsonl").write_text(f"{hostile}\n")
    assert "a.jsonl:1 is not JSON" in sentence(lambda: pack([tmp_path / "a.jsonl"], tmp_path / "x", workers=1))


def test_numbers_that_no_machine_has():
    plan = small_plan()
    plan["mesh"]["shard"] = 10**4000
    assert sentence(Plan.from_dict, plan) == "mesh.shard must be a positive integer of at most 64 bits, not one of 13288"
    data = Cluster.named("8xh100").to_dict()
    data["device"]["memory"] = 10**400
    assert "memory must be a number from 1e-30 to 1e+24" in sentence(Cluster.from_dict, data)


def small_plan() -> dict:
    from fullshard import zero3
    from fullshard.model import presets

    return zero3(presets.describe("llama-125m"), devices=2).to_dict()


RECIPE = '[model]\nname="llama-125m"\n[data]\npath="t"\nsequence=8\n[optim]\nlr=1e-3\n[train]\nsteps=1\nglobal_batch=2\n'


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"optim.lr={DEEP[:50_000]}", "is not TOML: it is nested deeper"),
        (f"train.steps={DIGITS}", "is not TOML: an integer has too many digits"),
        (f"train.steps=0x{DIGITS}", "is not TOML: an integer does not fit"),
        ("train.seed=1\n[model]", "input should be a valid integer"),
        (".=1", "unknown key"),
        ("=", "is no override"),
    ],
)
def test_hostile_overrides(override, says, tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE)
    assert load_recipe(tmp_path / "r.toml", []).train.steps == 1
    assert says in sentence(load_recipe, tmp_path / "r.toml", [override])


def test_a_sentence_stays_one():
    assert len(str(FullshardError("a" * 10**6))) < LONGEST + 10
    assert str(FullshardError("a\x1b[2Jb\x00\r")) == "a\\x1b[2Jb\\x00\\x0d"


# -- data -----------------------------------------------------------------------------------------------------


def tokens(path) -> dict:
    with TokenWriter(path, 256, "bytes") as writer:
        writer.add([1, 2, 3])
    return json.loads((path / "index.json").read_text())


@pytest.mark.parametrize("name", ["../other/00000", "/etc/passwd", "..", ".", "", "a/b", "a\0b", "a" * 300, ".hidden"])
def test_an_index_names_no_file_outside_its_directory(name, tmp_path):
    tokens(tmp_path / "other")
    index = tokens(tmp_path / "mine")
    index["shards"][0]["name"] = name
    (tmp_path / "mine" / "index.json").write_text(json.dumps(index))
    assert "which is not a file there; pack the data again" in sentence(TokenFile, tmp_path / "mine")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "u1,u2"), ("dtype", ["u1"]), ("dtype", "V9"), ("dtype", 10**400), ("vocab", 10**400), ("vocab", True),
        ("vocab", -1), ("version", True), ("version", 1.0), ("shards", []), ("shards", {}), ("shards", [[]]), ("tokenizer", {}),
    ],
)  # fmt: skip
def test_an_index_that_contradicts_itself(key, value, tmp_path):
    index = tokens(tmp_path / "mine")
    (tmp_path / "mine" / "index.json").write_text(json.dumps(index | {key: value}))
    assert "pack the data again" in sentence(TokenFile, tmp_path / "mine")


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([1, 256], "token 256 does not fit a vocabulary of 256"),
        ([1, -3], "token -3 does not fit a vocabulary of 256"),
        ([1.5], "are a list of integers"),
        (["a"], "are a list of integers"),
        ([10**30], "are a list of integers"),
        ([[1], [2, 3]], "are a list of integers"),
        (np.ones((2, 2), int), "are a list of integers"),
    ],
)
def test_tokens_that_are_none(document, says, tmp_path):
    with TokenWriter(tmp_path / "x", 256, "bytes") as writer:
        assert says in sentence(writer.add, document)
        assert "2 answers; give one for each token" in sentence(writer.add, [1, 2, 3], [1, 0])
        writer.marked = None
        writer.add([1])


def test_damaged_parquet_gets_a_sentence_wherever_the_damage_is(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i} " * 20 for i in range(200)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "whole.parquet", write_page_checksum=True)
    whole = bytearray((tmp_path / "whole.parquet").read_bytes())
    for at in range(4, len(whole), max(1, len(whole) // 40)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        (tmp_path / "a.parquet").write_bytes(damaged)
        try:
            pack([tmp_path / "a.parquet"], tmp_path / f"x{at}", workers=1)
        except FullshardError as error:
            assert "a.parquet" in str(error)  # noqa: PT017 - damage in statistics, which nobody reads, changes nothing
        else:
            want = pack([tmp_path / "whole.parquet"], tmp_path / f"y{at}", workers=1)
            got = TokenFile(tmp_path / f"x{at}")
            assert got.read(0, len(got)).tolist() == want.read(0, len(want)).tolist()


def test_a_directory_with_pipes_and_with_what_may_not_be_read(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello")
    os.mkfifo(tmp_path / "in" / "b.txt")
    assert pack([tmp_path / "in"], tmp_path / "x", workers=1).documents == 1
    if os.geteuid():
        (tmp_path / "in" / "closed").mkdir(mode=0)
        assert "closed: Permission denied" in sentence(lambda: pack([tmp_path / "in"], tmp_path / "y", workers=1))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", DEEP, '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}']
)
def test_a_damaged_tokenizer(text, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(text)
    assert "tokenizer.json" in sentence(open_tokenizer, str(tmp_path), None)
