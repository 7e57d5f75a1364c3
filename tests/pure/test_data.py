"""Token files and the global order of samples, compared with plain Python and numpy."""

import collections
import hashlib
import itertools
import json
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard import FullshardError
from fullshard.data import Batches, Order, TokenFile, TokenWriter, digest, refuse_different, refuse_other_tokenizer
from fullshard.data.sample_order import permute

GOLDEN, GOLDEN_LARGE = [249, 286, 400, 625, 809, 470], 923267269181119

# -- the order -----------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.text(max_size=5))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(n, key):
    assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))


def test_the_order_is_the_same_for_ever():
    """A checkpoint stores only the cursor: if these numbers change, resumed runs train on other data."""
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


def marked(path, documents, **options) -> TokenFile:
    """Write documents in which tokens divisible by three are answers."""
    with TokenWriter(path, 300, "test", **options) as writer:
        for document in documents:
            writer.add(document, [t % 3 == 0 for t in document])
    return TokenFile(path)


def test_answers_are_read_as_they_were_written(tmp_path):
    documents = [range(i, 2 * i + 1) for i in range(1, 30)]
    tokens = marked(tmp_path / "x", documents, shard_tokens=50)
    row = [t for d in documents for t in d]
    assert len(tokens.shards) > 5
    assert tokens.has_answers
    assert tokens.read_answers(3, 200).tolist() == [t % 3 == 0 for t in row[3:203]]
    assert tokens.answers == sum(t % 3 == 0 for t in row)
    tokens.verify()


def test_without_marks_every_token_is_an_answer(tmp_path):
    tokens = write(tmp_path / "x", [[1, 2, 3]])
    assert not tokens.has_answers
    assert tokens.read_answers(1, 2).tolist() == [True, True]
    assert not list((tmp_path / "x").glob("*.answers"))


@pytest.mark.parametrize(
    ("second", "sentence"),
    [(None, "some documents have answers marked and some have not"), ([1], "a document of 2 tokens has 1 answers")],
)
def test_answers_that_do_not_fit(tmp_path, second, sentence):
    def write_both():
        with TokenWriter(tmp_path / "x", 300, "test") as writer:
            writer.add([1, 2], [0, 1])
            writer.add([], None)
            writer.add([1, 2], second)

    with pytest.raises(FullshardError, match=sentence):
        write_both()
    assert list(tmp_path.iterdir()) == []


def rewrite(file, change) -> None:
    """Damage that the checksum does not show, because the index is changed too."""
    data = change(np.frombuffer(file.read_bytes(), {".tokens": "<u2", ".ends": "<u8", ".answers": "u1"}[file.suffix]).copy())
    file.write_bytes(data.tobytes())
    index = json.loads((file.parent / "index.json").read_text())
    index["shards"][0]["crc32"][file.suffix[1:]] = zlib.crc32(data.tobytes())
    (file.parent / "index.json").write_text(json.dumps(index))


def put(index, value):
    return lambda data: [data.__setitem__(index, value), data][1]


def flip(file) -> None:
    raw = bytearray(file.read_bytes())
    raw[3] ^= 1
    file.write_bytes(raw)


def reindex(path, change) -> None:
    index = json.loads((path / "index.json").read_text())
    change(index)
    (path / "index.json").write_text(json.dumps(index))


DAMAGE = {
    "truncated": (lambda p: (p / "00000.tokens").write_bytes(b"123"), "is damaged: it has 3 bytes, the index says 14"),
    "truncated ends": (
        lambda p: (p / "00000.ends").write_bytes(b"123"),
        "00000.ends is damaged: it has 3 bytes, the index says 24",
    ),
    "truncated answers": (
        lambda p: (p / "00000.answers").write_bytes(b""),
        "00000.answers is damaged: it has 0 bytes, the index says 7",
    ),
    "missing": (lambda p: (p / "00000.tokens").unlink(), "00000.tokens is missing; pack the data again"),
    "missing answers": (lambda p: (p / "00000.answers").unlink(), "00000.answers is missing; pack the data again"),
    "index": (lambda p: (p / "index.json").write_text("{"), "index.json is damaged"),
    "version": (lambda p: (p / "index.json").write_text('{"version": 9}'), "has version 9; this fullshard reads version 1"),
    "no shards": (lambda p: reindex(p, lambda i: i.update(shards=[])), "entries are missing or contradict each other"),
    "no name": (lambda p: reindex(p, lambda i: i["shards"][0].pop("name")), "entries are missing or contradict each other"),
    "answers not in the index": (lambda p: reindex(p, lambda i: i["shards"][0].pop("answers")), "contradict each other"),
    "flipped": (lambda p: flip(p / "00000.tokens"), "00000.tokens is damaged: its checksum does not match the index"),
    "flipped ends": (lambda p: flip(p / "00000.ends"), "00000.ends is damaged: its checksum does not match the index"),
    "flipped answers": (lambda p: flip(p / "00000.answers"), "00000.answers is damaged: its checksum does not match the index"),
    "falling ends": (lambda p: rewrite(p / "00000.ends", put(1, 1)), "ends is damaged: document ends do not increase"),
    "empty document": (lambda p: rewrite(p / "00000.ends", put(0, 0)), "ends is damaged: document ends do not increase"),
    "ends too early": (lambda p: rewrite(p / "00000.ends", put(2, 6)), "ends is damaged: document ends do not increase"),
    "outside": (lambda p: rewrite(p / "00000.tokens", put(2, 400)), "is damaged: token 400 is outside its vocabulary of 300"),
    "no answer": (lambda p: rewrite(p / "00000.answers", put(2, 7)), "an answer is neither 0 nor 1"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(tmp_path, kind):
    marked(tmp_path / "x", [[1, 2], [3, 4], [5, 6, 7]])
    do, sentence = DAMAGE[kind]
    do(tmp_path / "x")
    with pytest.raises(FullshardError) as caught:
        TokenFile(tmp_path / "x").verify()
    assert sentence in str(caught.value)
    assert "pack the data again" in str(caught.value)


def test_training_does_not_take_what_only_verify_would_refuse(tmp_path):
    """Out-of-vocabulary tokens crash an embedding on a GPU without a message; reading refuses them first."""
    marked(tmp_path / "x", [[1, 2], [3, 4], [5, 6, 7]])
    rewrite(tmp_path / "x" / "00000.tokens", put(2, 400))
    rewrite(tmp_path / "x" / "00000.ends", put(1, 1))
    with pytest.raises(FullshardError, match="token 400 is outside"):
        Batches(TokenFile(tmp_path / "x"), 6, 1).sample(0)
    with pytest.raises(FullshardError, match="do not increase"):
        Batches(TokenFile(tmp_path / "x"), 6, 1, boundaries="labels")


# -- tokenizers agree ------------------------------------------------------------------------------------


def test_a_model_with_another_tokenizer_is_refused(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    made = {}
    for name in ("bytes", "mine", f"sha256:{hashlib.sha256(b'{}').hexdigest()}"):
        with TokenWriter(tmp_path / name, 300, name) as writer:
            writer.add([1])
        made[name] = TokenFile(tmp_path / name)
        refuse_other_tokenizer(made[name], model)  # the model has no tokenizer to compare with
    (model / "tokenizer.json").write_text("{}")
    refuse_other_tokenizer(made[name], model)
    refuse_other_tokenizer(made["mine"], model)
    with pytest.raises(FullshardError, match="bytes was packed with another tokenizer") as caught:
        refuse_other_tokenizer(made["bytes"], model)
    assert str(caught.value).endswith(f"pack the text again with --tokenizer {model}")
    (model / "tokenizer.json").write_text("{ }")
    with pytest.raises(FullshardError, match=r"another tokenizer \(sha256:44136fa3\)"):
        refuse_other_tokenizer(made[name], model)
    refuse_different(made["bytes"], made["bytes"])
    with pytest.raises(
        FullshardError, match=r"were packed with different tokenizers \(bytes of 300 tokens, sha256:44136fa3 of 300\)"
    ):
        refuse_different(made["bytes"], made[name])


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


def test_no_token_predicts_the_next_document(tokens):
    ends = set(tokens.ends().tolist())
    batches = Batches(tokens, 5, 1, shuffle=False, boundaries="labels")
    for i in range(batches.samples):
        sample = batches.sample(i)
        assert [label == -100 for label in sample["labels"].tolist()] == [5 * i + t + 1 in ends for t in range(5)]
        assert set(sample) == {"input_ids", "labels"}


def test_positions_start_again_with_each_document(tokens):
    starts = {0, *tokens.ends().tolist()}
    batches = Batches(tokens, 30, 2, shuffle=False, boundaries="attention")
    plain = Batches(tokens, 30, 2, shuffle=False, boundaries="labels")
    for i in range(batches.samples):
        want, position = [], 0
        for t in range(30):
            position = 0 if 30 * i + t in starts or t == 0 else position + 1
            want.append(position)
        assert batches.sample(i)["position_ids"].tolist() == want
        assert batches.sample(i)["labels"].tolist() == plain.sample(i)["labels"].tolist()
    (batch,) = next(iter(batches))
    assert {key: (row.shape, row.dtype.name) for key, row in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), ((2, 30), "int64")
    )


def test_only_answers_are_labels(tmp_path):
    tokens = marked(tmp_path / "x", [range(20), range(50, 80)])
    row = [*range(20), *range(50, 80)]
    batches = Batches(tokens, 7, 1, shuffle=False)
    for i in range(batches.samples):
        sample = batches.sample(i)
        assert sample["input_ids"].tolist() == row[7 * i : 7 * i + 7]
        assert sample["labels"].tolist() == [t if t % 3 == 0 else -100 for t in row[7 * i + 1 : 7 * i + 8]]


def by_hand(documents: list[list[int]], sequence: int) -> list[dict[str, list[int]]]:
    """Rows of whole documents, by a slow reference implementation."""
    rows, row = [], []

    def close() -> None:
        padding = [(0, -100, p) for p in range(sequence - len(row))]
        rows.append([*row, *padding])
        row.clear()

    for document in documents:
        for first in range(0, len(document) - 1, sequence):
            inputs = document[first : first + sequence]
            labels = [*document[first + 1 : first + sequence + 1], -100][: len(inputs)]
            if len(row) + len(inputs) > sequence:
                close()
            row.extend(zip(inputs, labels, range(len(inputs)), strict=True))
    if row:
        close()
    return [dict(zip(("input_ids", "labels", "position_ids"), map(list, zip(*r, strict=True)), strict=True)) for r in rows]


@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=30).filter(lambda found: max(found) > 1),
    sequence=st.integers(1, 12),
    shard_tokens=st.integers(1, 60),
)
@settings(max_examples=100, deadline=None)
def test_whole_documents_lie_side_by_side(tmp_path_factory, lengths, sequence, shard_tokens):
    numbers = itertools.count()
    documents = [[next(numbers) for _ in range(n)] for n in lengths]
    tokens = write(tmp_path_factory.mktemp("t") / "x", documents, vocab=1000, shard_tokens=shard_tokens)
    batches = Batches(tokens, sequence, 1, shuffle=False, boundaries="attention", packing="whole")
    rows = [{key: row.tolist() for key, row in batches.sample(i).items()} for i in range(batches.samples)]
    assert rows == by_hand(documents, sequence)
    pairs = [(a, b) for r in rows for a, b in zip(r["input_ids"], r["labels"], strict=True) if b != -100]
    assert pairs == [pair for d in documents for pair in itertools.pairwise(d)]  # nothing is lost, nothing comes twice


def test_a_row_of_whole_documents(tmp_path):
    """Checked by hand: two documents fit into a row, the third does not; the rest of the fourth shares the fifth's row."""
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [*range(10, 18)], [20, 21]]
    batches = Batches(write(tmp_path / "x", documents), 6, 1, shuffle=False, boundaries="attention", packing="whole")
    assert [batches.sample(i)["input_ids"].tolist() for i in range(batches.samples)] == [
        [1, 2, 3, 4, 5, 0],
        [6, 7, 8, 9, 0, 0],
        [10, 11, 12, 13, 14, 15],
        [16, 17, 20, 21, 0, 0],
    ]
    assert batches.sample(2)["labels"].tolist() == [11, 12, 13, 14, 15, 16]
    assert batches.sample(3)["labels"].tolist() == [17, -100, 21, -100, -100, -100]
    assert batches.sample(3)["position_ids"].tolist() == [0, 1, 0, 1, 0, 1]


def test_whole_documents_with_answers(tmp_path):
    tokens = marked(tmp_path / "x", [[3, 4, 6], [9, 12, 13, 15]])
    batches = Batches(tokens, 8, 1, boundaries="labels", packing="whole")
    assert batches.sample(0)["labels"].tolist() == [-100, 6, -100, 12, -100, 15, -100, -100]


def test_data_with_nothing_to_predict_is_refused(tmp_path):
    with pytest.raises(FullshardError, match="no token marked as an answer"):
        Batches(marked(tmp_path / "x", [[1, 2, 4]]), 2, 1)
    with pytest.raises(FullshardError, match="no document of two tokens or more"):
        Batches(write(tmp_path / "y", [[1], [2], [4]]), 2, 1, boundaries="labels", packing="whole")


def test_whole_documents_come_in_the_same_steps_at_every_world_size(tokens):
    def steps(ranks, micro_batch):
        made = [
            iter(Batches(tokens, 20, micro_batch, 1, r, ranks, boundaries="attention", packing="whole")) for r in range(ranks)
        ]
        return [[row.tolist() for m in made for batch in next(m) for row in batch["input_ids"]] for _ in range(5)]

    assert steps(1, 4) == steps(2, 2) == steps(4, 1)


def test_two_batches_have_two_digests(tokens):
    batches = Batches(tokens, 5, 2, ranks=2, accumulate=3)
    other = Batches(tokens, 5, 2, ranks=2, accumulate=3, rank=1)
    found = [digest(batch) for source in (batches, other) for batch in next(iter(source))]
    assert len(set(found)) == 6
    assert all(0 <= d < 1 << 63 for d in found)
    batches.cursor = 0
    assert digest(next(iter(batches))[0]) == found[0]
    batch = {"input_ids": np.arange(6).reshape(2, 3), "labels": np.arange(6).reshape(2, 3)}
    assert digest(batch) != digest({**batch, "labels": np.arange(6).reshape(3, 2)})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sequence": 500, "micro_batch": 1}, "too few for one sample of 500 + 1"),
        ({"sequence": 5, "micro_batch": 1, "rank": 2, "ranks": 2}, "rank 2 is not one of 2 data ranks"),
        (
            {"sequence": 5, "micro_batch": 1, "boundaries": "label"},
            "boundaries is one of ignored, labels, attention, not 'label'",
        ),
        ({"sequence": 5, "micro_batch": 1, "boundaries": True}, "boundaries is one of ignored, labels, attention, not True"),
        (
            {"sequence": 5, "micro_batch": 1, "packing": "hole"},
            "packing is one of stream, whole, not 'hole'; did you mean 'whole'",
        ),
        ({"sequence": 5, "micro_batch": 1, "packing": "whole"}, "write boundaries 'labels' or 'attention', or packing 'stream'"),
        ({"sequence": 5, "micro_batch": 4, "cursor": 6}, "cursor 6 is not at the start of a step of 4 samples"),
    ],
)
def test_batches_that_cannot_be(tokens, arguments, sentence):
    with pytest.raises(FullshardError, match=sentence.replace("+", r"\+")):
        Batches(tokens, **arguments)
