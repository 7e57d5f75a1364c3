"""Packing text, compared with plain Python, the tokenizers library and the datasets library."""

import hashlib
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import Future

import pytest
from typer.testing import CliRunner

from fullshard import FullshardError
from fullshard.commands.cli import app
from fullshard.data.pack_tokens import _in_order, pack
from fullshard.data.sources import HubDataset


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("first document, ünïcode\n")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": f"line {i}", "id": i}) + "\n" for i in range(200)))
    (folder / "ignored.bin").write_bytes(b"\xff")
    return folder


TEXTS = ["first document, ünïcode\n", *[f"line {i}" for i in range(200)]]


def test_bytes(tmp_path, corpus):
    made = pack([corpus], tmp_path / "x", workers=1)
    assert bytes(made.read(0, len(made)).tolist()) == b"".join(t.encode() + b"\0" for t in TEXTS)
    assert (made.vocab, made.tokenizer, made.documents) == (256, "bytes", 201)


def test_the_number_of_workers_does_not_matter(tmp_path, corpus):
    one, two = (pack([corpus], tmp_path / str(n), workers=n) for n in (1, 2))
    assert (one.path / "00000.tokens").read_bytes() == (two.path / "00000.tokens").read_bytes()
    assert (one.path / "index.json").read_text() == (two.path / "index.json").read_text()


def test_a_worker_that_is_killed(tmp_path, corpus):
    (corpus / "c.jsonl").write_text('{"text": "more than workers read ahead"}\n' * 5000)
    kill = lambda *_: [child.kill() for child in multiprocessing.active_children()]
    with pytest.raises(FullshardError, match="a worker of pack ended early: it was killed, most likely for lack of memory"):
        pack([corpus], tmp_path / "x", workers=2, progress=kill)
    assert not (tmp_path / "x").exists()


def test_a_script_that_every_worker_runs_again(tmp_path, corpus):
    script = f"from fullshard.data.pack_tokens import pack; pack([{str(corpus)!r}], {str(tmp_path / 'x')!r}, workers=2)"
    (tmp_path / "script.py").write_text(script)
    found = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=200)
    assert found.returncode == 1
    assert 'calls pack outside of `if __name__ == "__main__":`' in found.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_a_script_from_standard_input(tmp_path, corpus, workers):
    chosen = "" if workers is None else f", workers={workers}"
    call = f"pack([{str(corpus)!r}], {str(tmp_path / 'x')!r}{chosen})"
    script = f"from fullshard.data.pack_tokens import pack\nif __name__ == '__main__':\n    {call}\n"
    found = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=200)
    refused = "there is no file <stdin>; write workers=1, or put the script in a file" in found.stderr
    assert (found.returncode, refused) == ((1, True) if workers == 2 else (0, False))
    assert (tmp_path / "x").exists() == (workers != 2)


def test_no_more_is_read_than_workers_need():
    class Pool:
        def submit(self, encode, group):
            done = Future()
            done.set_result(encode(group))
            return done

    read = []
    groups = (read.append(i) or [i] for i in range(100))
    for found in _in_order(Pool(), list, groups, 8):
        assert len(read) <= found[0] + 8
    assert len(read) == 100


@pytest.fixture
def tokenizer(tmp_path) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.train_from_iterator(
        TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", "</s>"], show_progress=False)
    )
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return str(path)


def test_a_tokenizer_file(tmp_path, corpus, tokenizer):
    from tokenizers import Tokenizer

    oracle = Tokenizer.from_file(tokenizer)
    want = [i for text in TEXTS for i in [*oracle.encode(text, add_special_tokens=False).ids, oracle.token_to_id("</s>")]]
    made = pack([corpus], tmp_path / "x", tokenizer=tokenizer, workers=2)
    assert made.read(0, len(made)).tolist() == want
    assert made.vocab == oracle.get_vocab_size()
    assert made.tokenizer.startswith("sha256:")


def test_a_tokenizer_s_own_truncation_and_padding_do_nothing(tmp_path, corpus, tokenizer):
    from tokenizers import Tokenizer

    want = pack([corpus], tmp_path / "want", tokenizer=tokenizer, workers=1)
    cut = Tokenizer.from_file(tokenizer)
    cut.enable_truncation(3)
    cut.enable_padding(length=40)
    cut.save(str(tmp_path / "cut.json"))
    made = pack([corpus], tmp_path / "x", tokenizer=str(tmp_path / "cut.json"), workers=1)
    assert made.read(0, len(made)).tolist() == want.read(0, len(want)).tolist()


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"body": TEXTS}), tmp_path / "a.parquet")
    made = pack([tmp_path / "a.parquet"], tmp_path / "x", field="body", workers=1)
    assert bytes(made.read(0, len(made)).tolist()) == b"".join(t.encode() + b"\0" for t in TEXTS)
    with pytest.raises(FullshardError, match="has no column 'text'"):
        pack([tmp_path / "a.parquet"], tmp_path / "y", workers=1)


BAD = {
    "missing": (lambda p: p / "nowhere.txt", {}, "there is no file"),
    "ending": (lambda p: p / "corpus" / "ignored.bin", {}, "cannot read .bin"),
    "empty directory": (lambda p: p / "empty", {}, "has no .txt"),
    "not UTF-8": (lambda p: p / "latin.txt", {}, "is not UTF-8 text (byte 1)"),
    "not JSON": (lambda p: p / "bad.jsonl", {}, "bad.jsonl:2 is not JSON"),
    "number": (
        lambda p: p / "corpus" / "b.jsonl",
        {"field": "id"},
        "b.jsonl:1: 'id' is a number, not text; name the field that holds the text with --field",
    ),
    "field": (
        lambda p: p / "corpus" / "b.jsonl",
        {"field": "txt"},
        "has no text in 'txt' (it has text, id); did you mean 'text'?",
    ),
    "conversation": (lambda p: p / "chat.jsonl", {}, "(it has messages); for conversations add --chat"),
    "half a character": (lambda p: p / "half.jsonl", {}, "half.jsonl:1 holds half of a surrogate pair"),
    "no object": (lambda p: p / "list.jsonl", {}, "list.jsonl:1 is not a JSON object"),
    "not Parquet": (lambda p: p / "bad.parquet", {}, "bad.parquet is not a Parquet file"),
    "latin JSON": (lambda p: p / "latin.jsonl", {}, "latin.jsonl is not UTF-8 text"),
    "empty tokenizer": (lambda p: p / "corpus", {"tokenizer": "empty"}, "empty has no tokenizer.json"),
    "template": (lambda p: p / "corpus", {"template": "x.jinja"}, "--template has no effect without --chat"),
    "tokenizer": (lambda p: p / "corpus", {"tokenizer": "nowhere.json"}, "there is no tokenizer file nowhere.json"),
    "not a tokenizer": (lambda p: p / "corpus", {"tokenizer": "bad.jsonl"}, "bad.jsonl is not a tokenizer.json"),
    "end for bytes": (lambda p: p / "corpus", {"end": "</s>"}, "--end has no effect with --tokenizer bytes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input(tmp_path, corpus, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"a\xe9b")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a\xe9b"}')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud83d"}')
    (tmp_path / "list.jsonl").write_text("[1]")
    (tmp_path / "bad.parquet").write_text("no")
    (tmp_path / "chat.jsonl").write_text('{"messages": []}')
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\nnot json\n')
    where, options, sentence = BAD[kind]
    with pytest.raises(FullshardError) as caught:
        pack([where(tmp_path)], tmp_path / "x", workers=1, **options)
    assert sentence in str(caught.value)
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob(".x.partial*"))


def test_an_end_the_tokenizer_does_not_have(tmp_path, corpus, tokenizer):
    with pytest.raises(FullshardError, match="has no token '<end>'; name the token that ends a document with --end"):
        pack([corpus], tmp_path / "x", tokenizer=tokenizer, end="<end>")


def test_the_end_is_the_one_that_the_tokenizer_s_own_config_names(tmp_path, corpus, tokenizer):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<unk>"}}))
    made = pack([corpus], tmp_path / "x", tokenizer=str(tmp_path), workers=1)
    assert made.read(int(made.ends()[0]) - 1, 1).tolist() == [0]
    assert made.tokenizer == f"sha256:{hashlib.sha256((tmp_path / 'tokenizer.json').read_bytes()).hexdigest()}"


# -- Hugging Face datasets ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same texts saved by the datasets library, with and without splits."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("datasets")
    made = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
    made.save_to_disk(folder / "one")
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(folder / "splits")
    (folder / "files").mkdir()
    made.to_parquet(folder / "files" / "train.parquet")
    made.to_json(folder / "lines.jsonl")
    return folder


@pytest.mark.parametrize(
    ("name", "split", "count"),
    [("one", None, 201), ("splits", "test", 1), ("splits", None, 201), ("files", "train", 201), ("lines.jsonl", None, 201)],
)
def test_a_dataset(tmp_path, saved, name, split, count):
    made = pack([HubDataset(str(saved / name), split=split)], tmp_path / "x", workers=1)
    assert bytes(made.read(0, len(made)).tolist()) == b"".join(t.encode() + b"\0" for t in TEXTS[:count])


@pytest.mark.parametrize(
    ("name", "options", "field", "sentence"),
    [
        ("one", {"split": "train"}, None, "--split has no effect on"),
        ("one", {"subset": "x"}, None, "--subset has no effect on"),
        ("one", {}, "txt", "has no column 'txt' (it has text, id); did you mean 'text'?"),
        ("one", {}, "id", "row 2: 'id' is a number, not text; name the field that holds the text with --field"),
        ("splits", {"split": "valid"}, None, "has no split 'valid' (it has train, test); name one with --split"),
        ("files", {"split": "valid"}, None, "cannot read the dataset"),
        ("nowhere", {}, None, "cannot read the dataset"),
        ("lines.jsonl", {"subset": "x"}, None, "--subset has no effect on"),
    ],
)
def test_a_dataset_that_cannot_be_read(tmp_path, saved, name, options, field, sentence):
    with pytest.raises(FullshardError) as caught:
        pack([HubDataset(str(saved / name), **options)], tmp_path / "x", field=field, workers=1)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# -- the command -------------------------------------------------------------------------------------------


def told(*arguments: str) -> str:
    """What the command prints, or its error."""
    done = CliRunner().invoke(app, ["data", *arguments])
    assert done.exception is None or isinstance(done.exception, FullshardError | SystemExit), done.exception
    return str(done.exception) if isinstance(done.exception, FullshardError) else done.output


def test_the_command_packs_files_and_datasets(tmp_path, saved):
    (tmp_path / "a.txt").write_text("hello")
    out = str(tmp_path / "x")
    printed = told("pack", str(tmp_path / "a.txt"), "--dataset", str(saved / "splits"), "--split", "test", "-o", out, "--json")
    facts = json.loads(printed)
    assert (facts["tokens"], facts["documents"]) == (len("hello") + 1 + len(TEXTS[0].encode()) + 1, 2)
    assert "answers" not in facts


def test_the_command_packs_conversations(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1?", "completion": "2"}')
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    template = ("--chat", "--template", str(tmp_path / "t.jinja"))
    facts = json.loads(told("pack", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "x"), *template, "--json", "--workers", "1"))
    assert (facts["tokens"], facts["answers"]) == (6, 2)
    assert "answers    2" in told("show", str(tmp_path / "x"), "--verify")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to pack; give files or directories, or --dataset NAME"),
        (["a.txt", "--split", "train"], "--split has no effect without --dataset"),
        (["a.txt", "--subset", "en"], "--subset has no effect without --dataset"),
    ],
)
def test_the_command_refuses(tmp_path, arguments, sentence):
    assert sentence in told("pack", *arguments, "-o", str(tmp_path / "x"))
