"""Data of any kind: the same samples at every world size and after a resume; what is wrong with it, in a sentence."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from fullshard import FullshardError
from fullshard.data import SampleBatches, SampleRules, StreamBatches
from fullshard.data.collate import PadRows
from fullshard.data.images import Decode, open_image_folder
from fullshard.data.objective_samples import KeepSample, Labels, LabelText, MaskText, PairTexts
from fullshard.data.sample_batches import is_indexed
from fullshard.data.tables import open_columns
from fullshard.data.text_encoder import TextEncoder, open_encoder

BYTES = TextEncoder(None)
NUMBERS = [{"x": np.array([i, -i])} for i in range(21)]


def taken(make, ranks: int, accumulate: int, steps: int = 6, cursor: int = 0) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    micro = 8 // (ranks * accumulate)
    sources = [iter(make(micro_batch=micro, accumulate=accumulate, rank=r, ranks=ranks, cursor=cursor)) for r in range(ranks)]
    return [[int(x) for s in sources for batch in next(s) for x in batch["x"][:, 0]] for _ in range(steps)]


def indexed(**share):
    return SampleBatches(NUMBERS, seed=3, **share)


def streamed(**share):
    return StreamBatches(lambda: iter([{"x": np.array([i, -i])} for i in range(100)]), **share)


@pytest.mark.parametrize("make", [indexed, streamed])
@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (4, 2), (1, 8)])
def test_the_same_samples_at_every_world_size_and_from_any_cursor(make, ranks, accumulate):
    whole = taken(make, 1, 1)
    assert taken(make, ranks, accumulate) == whole
    assert taken(make, ranks, accumulate, 3, cursor=24) == whole[3:]


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own():
    found = [x for step in taken(indexed, 2, 1, steps=21) for x in step]
    epochs = [found[i : i + 21] for i in range(0, 168, 21)]
    assert all(sorted(epoch) == list(range(21)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8
    assert [x for step in taken(streamed, 1, 1) for x in step] == list(range(48))  # a stream keeps its order


class Counting:
    """An iterable data set that can tell its state; counts what was read."""

    def __init__(self):
        self.at = 0
        self.read = 0

    def __iter__(self):
        while self.at < 100:
            self.at += 1
            self.read += 1
            yield {"x": np.array([self.at - 1, 0])}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_stream_with_a_state_resumes_without_reading_again():
    opened = []
    make = lambda: opened.append(Counting()) or opened[-1]
    first = StreamBatches(make, 4)
    steps = iter(first)
    [next(steps) for _ in range(5)]
    assert json.loads(first.state) == {"at": 20}
    said = []
    again = StreamBatches(make, 4, say=said.append)
    again.resume(first.cursor, first.state)
    assert next(iter(again))[0]["x"][:, 0].tolist() == [20, 21, 22, 23]
    assert opened[-1].read == 4
    assert not said
    again.resume(20, first.state)
    again.cursor = 28  # as after a rollback, which skips batches
    assert next(iter(again))[0]["x"][:, 0].tolist() == [28, 29, 30, 31]
    assert opened[-1].read == 12
    assert "read 8 samples of the data set again in" in said[0]


def test_a_stream_without_a_state_reads_again_and_says_so():
    said = []
    found = next(iter(StreamBatches(lambda: (n for n in NUMBERS), 4, cursor=8, say=said.append)))
    assert found[0]["x"][:, 0].tolist() == [8, 9, 10, 11]
    assert said[0].startswith("read 8 samples of the data set again in 0.")


def test_a_stream_that_ends():
    source = StreamBatches(lambda: iter(NUMBERS), 4, rules=SampleRules("data.py:numbers"))
    with pytest.raises(FullshardError, match=r"data.py:numbers ended in the step after sample 20: .* write train.steps = 5"):
        [len(step) for step in source]
    assert source.cursor == 20
    assert len(list(StreamBatches(lambda: iter(NUMBERS), 4, last=40))) == 5  # held-out data may be short


# -- masked text -------------------------------------------------------------------------------------------------


def test_berts_rule():
    """15% of the tokens count; of them 80% are masked, 10% random, 10% kept. Of random ones 1 in 256 is the token itself."""
    text = "".join(random.Random(0).choice("abcdefgh ") for _ in range(2000))
    make = MaskText(BYTES, "text", 2000, 0.15, seed=1)
    kinds: Counter[str] = Counter()
    for i in range(40):
        row = make({"text": text}, i, "a row")
        counts = row["labels"] != -100
        assert counts.sum() == 300
        original = np.frombuffer(text.encode(), np.uint8)
        assert (row["labels"][counts] == original[counts]).all()
        assert (row["input_ids"][~counts] == original[~counts]).all()
        for token, label in zip(row["input_ids"][counts], row["labels"][counts], strict=True):
            kinds["mask" if token == 255 else "kept" if token == label else "random"] += 1
    assert kinds["mask"] / 12000 == pytest.approx(0.8, abs=0.012)
    assert kinds["random"] / 12000 == pytest.approx(0.1, abs=0.01)
    assert kinds["kept"] / 12000 == pytest.approx(0.1, abs=0.01)


def test_masks_depend_on_seed_and_place_alone():
    draw = lambda seed, i: MaskText(BYTES, "text", 64, 0.15, seed)({"text": "a text of some length"}, i, "")["input_ids"].tolist()
    assert draw(0, 5) == draw(0, 5)
    assert len({tuple(draw(seed, i)) for seed in (0, 1, -1) for i in range(8)}) == 24


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tokenizer like BERT's: [CLS] text [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "down"])}
    made = Tokenizer(models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    path = tmp_path_factory.mktemp("bert") / "tokenizer.json"
    made.save(str(path))
    return open_encoder(str(path))


def test_special_tokens_stay_and_are_never_masked(bert):
    assert bert("the cat sat down", 9).ids.tolist() == [2, 5, 6, 7, 8, 3]
    assert bert("the cat sat down", 4).ids.tolist() == [2, 5, 6, 3]  # cut, and still closed
    assert (bert.mask_id, bert.pad_id, bert.vocab) == (4, 0, 9)
    for i in range(50):
        row = MaskText(bert, "text", 9, 0.15, 0)({"text": "the cat sat down"}, i, "")
        assert (row["labels"][[0, 5]] == -100).all()
        assert (row["labels"] != -100).sum() == 1  # at least one


def test_pairs_and_labels_are_padded(bert):
    pair = PairTexts(bert, "source", "target", 8, 4)
    rows = [{"source": "the cat", "target": "cat sat down the cat"}, {"source": "cat", "target": "sat"}]
    samples = [pair(row, i, "") for i, row in enumerate(rows)]
    collate = PadRows((("input_ids", 0, 8), ("attention_mask", 0, 8), ("labels", -100, 4)), "longest")
    batch = collate(samples)
    assert batch["input_ids"].tolist() == [[2, 5, 6, 3, 0, 0, 0, 0], [2, 6, 3, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [4, 3]
    assert batch["labels"].tolist() == [[2, 6, 7, 3], [2, 7, 3, -100]]
    longer = PadRows((("input_ids", 0, 20), ("attention_mask", 0, 20), ("labels", -100, 4)), "full")(samples)
    assert longer["input_ids"].shape == (2, 20)
    label = LabelText(bert, "text", Labels("label", ("no", "yes"), 2), 8)
    assert label({"text": "cat", "label": "yes"}, 0, "")["labels"] == 1


# -- tables and images -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The same rows as Parquet, JSONL, CSV and a saved data set."""
    import datasets
    import pyarrow
    from pyarrow import csv, parquet

    here = tmp_path_factory.mktemp("tables")
    rows = [{"text": f"row {i}", "label": i % 3} for i in range(10)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, here / "a.parquet")
    csv.write_csv(table, here / "a.csv")
    (here / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(rows).save_to_disk(here / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(here / "splits")
    return here, rows


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl", "saved", "splits/train"])
def test_every_table_has_the_same_rows(tables, name):
    here, rows = tables
    found = open_columns(str(here / name))
    assert [found[i] for i in range(len(found))] == rows
    assert found.pick(["label"]).values("label") == [row["label"] for row in rows]
    with pytest.raises(FullshardError, match=r"has no column 'lable' \(it has text, label\); did you mean 'label'\?"):
        found.pick(["lable"])


def test_bad_tables(tables, tmp_path):
    here, _ = tables
    with pytest.raises(FullshardError, match=r"splits holds the splits train; name one, as in '.*splits/train'"):
        open_columns(str(here / "splits"))
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"b": 1}\n')
    with pytest.raises(FullshardError, match=r"a.jsonl:2 lacks the key 'a'; give every line the same keys"):
        open_columns(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.parquet").write_bytes(b"nonsense")
    with pytest.raises(FullshardError, match=r"cannot read .*a.parquet: "):
        open_columns(str(tmp_path / "a.parquet"))
    (tmp_path / "b.csv").write_text("a,b\n")
    with pytest.raises(FullshardError, match="has no rows"):
        open_columns(str(tmp_path / "b.csv"))


def test_images_are_resized_cut_and_normalised(tmp_path):
    from PIL import Image

    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, 2:6] = 255  # the middle, which a crop keeps
    Image.fromarray(pixels).save(tmp_path / "a.png")
    path = str(tmp_path / "a.png")
    assert (Decode(4)(path, "") == np.ones((3, 4, 4), np.float32)).all()
    assert Decode(4, "stretch")(path, "").shape == (3, 4, 4)
    assert Decode(4, "stretch")(path, "").mean() == pytest.approx(0, abs=0.05)
    whole = Decode(None, "none", (0.0, 0.5, 0.25), (1.0, 0.5, 2.0))(path, "")
    assert whole.shape == (3, 4, 8)
    assert whole[:, 0, 3].tolist() == [1.0, 1.0, 0.375]
    assert (Decode(4)({"bytes": (tmp_path / "a.png").read_bytes(), "path": None}, "") == 1).all()


def test_a_folder_of_images(tmp_path):
    from PIL import Image

    for name in ("dog", "cat"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "1.png")
    found = open_image_folder(str(tmp_path))
    assert found.classes == ("cat", "dog")
    assert [found[i] for i in (0, 1)] == [
        {"image": str(tmp_path / "cat/1.png"), "label": 0},
        {"image": str(tmp_path / "dog/1.png"), "label": 1},
    ]
    assert open_image_folder(str(tmp_path), ("bird", "cat", "dog"))[0]["label"] == 1  # as in the training data
    with pytest.raises(FullshardError, match="has the class 'dog', which the training data has not"):
        open_image_folder(str(tmp_path), ("cat",))
    (tmp_path / "bird").mkdir()
    with pytest.raises(FullshardError, match="bird has no images"):
        open_image_folder(str(tmp_path))
    with pytest.raises(FullshardError, match="has no sub-folders; give each class of images one"):
        open_image_folder(str(tmp_path / "bird"))
    (tmp_path / "cat/1.png").write_bytes(b"no picture")
    with pytest.raises(FullshardError, match=r"the cat is not an image that can be read: .*; remove it"):
        Decode(4)(str(tmp_path / "cat/1.png"), "the cat")
    with pytest.raises(FullshardError, match=r"row 3: there is no image .*none.png; add it, or remove the row"):
        Decode(4)(str(tmp_path / "none.png"), "row 3")


# -- what is wrong with samples --------------------------------------------------------------------------------


def test_samples_that_differ_in_shape_are_named():
    rows = [{"x": np.zeros(3)}, {"x": np.zeros(3)}, {"x": np.zeros(4)}, {"x": np.zeros(3)}]
    source = SampleBatches(rows, 4, shuffle=False, rules=SampleRules("data.py:rows"))
    with pytest.raises(FullshardError, match=r"data.py:rows, sample 2 has x of 4, but data.py:rows, sample 0 of 3; make their"):
        source.load(0)


BAD = [
    (KeepSample((("input_ids", "ids"),)), {"idss": 1}, r"a row has no field 'ids' \(it has idss\); did you mean 'idss'\?"),
    (KeepSample(), None, "a row is None; return a dict of arrays"),
    (MaskText(BYTES, "text", 8, 0.15, 0), {"text": ""}, "a row has no text to mask; leave it out"),
    (MaskText(BYTES, "text", 8, 0.15, 0), {"text": 3}, "a row has an int in 'text', not text"),
    (MaskText(BYTES, "text", 8, 0.15, 0), "words", "a row is a str, without the field 'text'; return dicts"),
    (PairTexts(BYTES, "source", "target", 8, 8), {"source": "a", "target": ""}, "a row has an empty 'target'"),
    (
        LabelText(BYTES, "text", Labels("label", None, 3), 8),
        {"text": "a", "label": 3},
        "label 3, but the model has the classes 0 to 2",
    ),
    (LabelText(BYTES, "text", Labels("label", None, 3), 8), {"text": "a", "label": -1}, "has the label -1"),
    (
        LabelText(BYTES, "text", Labels("label", None, 3), 8),
        {"text": "a", "label": 0.5},
        "a float in 'label'; a label is the number",
    ),
    (
        LabelText(BYTES, "text", Labels("label", ("cat", "dog"), 2), 8),
        {"text": "a", "label": "dogs"},
        r"the label 'dogs', which the training data has not \(cat, dog\); did you mean 'dog'\?",
    ),
]


@pytest.mark.parametrize(("make", "row", "sentence"), BAD)
def test_bad_rows(make, row, sentence):
    with pytest.raises(FullshardError, match=sentence):
        make(row, 0, "a row")


def test_what_a_callable_may_return():
    class Streamed:
        def __iter__(self):
            return iter([])

    class IterableDataset(Streamed):  # torch's and datasets' own have __getitem__ or a length too
        def __len__(self):
            return 3

        def __getitem__(self, i):
            raise IndexError(i)

    assert is_indexed([1, 2], "f")
    assert not is_indexed(Streamed(), "f")
    assert not is_indexed(IterableDataset(), "f")
    assert not is_indexed((x for x in [1]), "f")
    for wrong in (3, None, {"a": 1}, "text"):
        with pytest.raises(FullshardError, match="f returned"):
            is_indexed(wrong, "f")


def test_a_sample_that_cannot_be_read_is_named():
    class Broken(list):
        def __getitem__(self, i):
            raise KeyError("pixels")

    with pytest.raises(FullshardError, match="the data set, sample 0 cannot be read: KeyError: 'pixels'"):
        SampleBatches(Broken([1]), 1, shuffle=False).load(0)
    with pytest.raises(FullshardError, match="the data set has no samples"):
        SampleBatches([], 1)
