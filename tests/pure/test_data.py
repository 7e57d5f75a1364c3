"""Token files and the global order: against plain Python, numpy, and the tokenizer itself."""

import collections
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard import FullshardError
from fullshard.data import Batches, Order, TokenFile, TokenWriter
from fullshard.data.order import permute
from fullshard.data.pack import pack

GOLDEN, GOLDEN_LARGE = [249, 286, 400, 625, 809, 470], 923267269181119

# -- the order -----------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.text(max_size=5))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(n, key):
    assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))


def test_the_order_is_the_same_for_ever():
    """A checkpoint holds nothing but the cursor: if these numbers change, every resumed run changes its data."""
    assert [Order(1000, seed=7)[i] for i in range(6)] == GOLDEN
    assert Order(10**15, seed=7)[3] == GOLDEN_LARGE


def test_every_epoch_holds_every_sample_once_in_another_order():
    order = Order(50, seed=1)
    epochs = [[order[50 * e + i] for i in range(50)] for e in range(3)]
    assert all(sorted(e) == list(range(50)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [Order(50, seed=2)[i] for i in range(50)] != epochs[0]
    assert [Order(50, shuffle=False)[i] for i in range(52)] == [*range(50), 0, 1]


def test_it_looks_shuffled():
    """Where the first sample of 16 goes, over 4000 keys: uniform within five deviations."""
    counts = collections.Counter(permute(0, 16, str(k)) for k in range(4000))
    assert all(abs(counts[i] - 250) < 5 * 250**0.5 for i in range(16)), counts
    order = [Order(10_000, seed=3)[i] for i in range(10_000)]
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
    assert neighbours < 20  # 2 are expected


# -- token files -----------------------------------------------------------------------------------------


def write(path, documents, *, vocab=300, shard_tokens=1 << 20) -> TokenFile:
    with TokenWriter(path, vocab, "test", shard_tokens=shard_tokens) as writer:
        for document in documents:
            writer.add(document)
    return TokenFile(path)


@given(
    documents=st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=20), min_size=1, max_size=30),
    shard_tokens=st.integers(1, 60),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read(tmp_path_factory, documents, shard_tokens, data):
    tokens = write(tmp_path_factory.mktemp("t") / "x", documents, shard_tokens=shard_tokens)
    row = [t for d in documents for t in d]
    assert len(tokens) == len(row)
    assert tokens.documents == len(documents)
    assert tokens.ends().tolist() == np.cumsum([len(d) for d in documents]).tolist()
    start = data.draw(st.integers(0, len(row)))
    length = data.draw(st.integers(0, len(row) - start))
    assert tokens.read(start, length).tolist() == row[start : start + length]
    tokens.verify()


@pytest.mark.parametrize(("vocab", "dtype"), [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_tokens_are_as_narrow_as_they_can_be(tmp_path, vocab, dtype):
    tokens = write(tmp_path / "x", [[0, vocab - 1]], vocab=vocab)
    assert tokens.dtype.name == dtype
    assert tokens.read(0, 2).tolist() == [0, vocab - 1]


def test_a_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(FullshardError, match="token 300 does not fit a vocabulary of 300"):
        write(tmp_path / "x", [[1, 2], [300]])
    with pytest.raises(FullshardError, match="the input has no tokens"):
        write(tmp_path / "x", [[]])
    assert list(tmp_path.iterdir()) == []


def damage(path, kind: str) -> None:
    tokens = path / "00000.tokens"
    if kind == "truncated":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif kind == "missing":
        tokens.unlink()
    elif kind == "index":
        (path / "index.json").write_text("{")
    elif kind == "version":
        (path / "index.json").write_text(json.dumps({"version": 9}))
    elif kind == "flipped":
        raw = bytearray(tokens.read_bytes())
        raw[3] ^= 1
        tokens.write_bytes(raw)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("truncated", "has 9 bytes, the index says 10: it is damaged"),
        ("missing", "00000.tokens is missing; pack the data again"),
        ("index", "index.json is damaged"),
        ("version", "is of version 9; this fullshard reads version 1"),
        ("flipped", "is damaged: its checksum is not the index's"),
    ],
)
def test_damage_is_found(tmp_path, kind, sentence):
    write(tmp_path / "x", [[1, 2, 3, 4, 5]])
    damage(tmp_path / "x", kind)
    with pytest.raises(FullshardError) as caught:
        TokenFile(tmp_path / "x").verify()
    assert sentence in str(caught.value)


# -- batches --------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path) -> TokenFile:
    return write(tmp_path / "x", [range(100 * i, 100 * i + 17 + i) for i in range(9)], vocab=1000, shard_tokens=40)


def taken(tokens: TokenFile, *, ranks: int, accumulate: int, micro_batch: int, steps: int, cursor: int = 0) -> list[list]:
    """The samples of each step over all ranks, as sorted rows."""
    sources = [iter(Batches(tokens, 5, micro_batch, accumulate, rank, ranks, seed=4, cursor=cursor)) for rank in range(ranks)]
    found = []
    for _ in range(steps):
        rows = [row.tolist() for source in sources for batch in next(source) for row in batch["input_ids"]]
        found.append(sorted(rows))
    return found


@pytest.mark.parametrize(("ranks", "accumulate", "micro_batch"), [(1, 1, 8), (2, 2, 2), (4, 2, 1), (8, 1, 1)])
def test_a_step_takes_the_same_samples_at_every_world_size(tokens, ranks, accumulate, micro_batch):
    want = taken(tokens, ranks=1, accumulate=8, micro_batch=1, steps=12)
    assert taken(tokens, ranks=ranks, accumulate=accumulate, micro_batch=micro_batch, steps=12) == want


def test_an_epoch_holds_every_sample_once(tokens):
    samples = Batches(tokens, 5, 1).samples
    steps = taken(tokens, ranks=2, accumulate=1, micro_batch=1, steps=samples // 2)
    rows = [tuple(row) for step in steps for row in step]
    assert len(rows) == len(set(rows)) == samples - samples % 2


def test_the_cursor_resumes_at_another_world_size(tokens):
    whole = taken(tokens, ranks=1, accumulate=2, micro_batch=4, steps=6)
    batches = Batches(tokens, 5, 4, 2, seed=4)
    source = iter(batches)
    for _ in range(3):
        next(source)
    assert batches.cursor == 24
    assert taken(tokens, ranks=4, accumulate=1, micro_batch=2, steps=3, cursor=batches.cursor) == whole[3:]


def test_labels_are_the_next_tokens(tokens):
    row = tokens.read(0, len(tokens))
    for i in range(20):
        sample = Batches(tokens, 5, 1, seed=4).sample(i)
        start = Order(Batches(tokens, 5, 1).samples, 4)[i] * 5
        assert sample["input_ids"].tolist() == row[start : start + 5].tolist()
        assert sample["labels"].tolist() == row[start + 1 : start + 6].tolist()


def test_within_documents_no_token_predicts_the_next_document(tokens):
    ends = set(tokens.ends().tolist())
    batches = Batches(tokens, 5, 1, shuffle=False, within_documents=True)
    for i in range(batches.samples):
        labels = batches.sample(i)["labels"].tolist()
        assert [label == -100 for label in labels] == [5 * i + t + 1 in ends for t in range(5)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sequence": 500, "micro_batch": 1}, "too few for one sample of 500 + 1"),
        ({"sequence": 5, "micro_batch": 1, "rank": 2, "ranks": 2}, "rank 2 is not one of 2 data ranks"),
        ({"sequence": 5, "micro_batch": 4, "cursor": 6}, "cursor 6 is not at the start of a step of 4 samples"),
    ],
)
def test_batches_that_cannot_be(tokens, arguments, sentence):
    with pytest.raises(FullshardError, match=sentence.replace("+", r"\+")):
        Batches(tokens, **arguments)


# -- packing ---------------------------------------------------------------------------------------------


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
    "field": (
        lambda p: p / "corpus" / "b.jsonl",
        {"field": "txt"},
        "has no text in 'txt' (it has text, id); did you mean 'text'?",
    ),
    "tokenizer": (lambda p: p / "corpus", {"tokenizer": "nowhere.json"}, "there is no tokenizer file nowhere.json"),
    "not a tokenizer": (lambda p: p / "corpus", {"tokenizer": "bad.jsonl"}, "bad.jsonl is not a tokenizer.json"),
    "end for bytes": (lambda p: p / "corpus", {"end": "</s>"}, "--end has no effect with --tokenizer bytes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input(tmp_path, corpus, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"a\xe9b")
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
