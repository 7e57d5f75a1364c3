import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.base.errors import nearest
from fullshard.base.text import bytes_text, count_text, spans, table


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2, "1.00 MiB"),
        (80 * 1024**3, "80.00 GiB"),
        (1024**4, "1.00 TiB"),
        (5000 * 1024**4, "5000.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (124_439_808, "124.44M"),
        (8_030_261_248, "8.03B"),
        (405_853_388_800, "405.85B"),
        (1e12, "1.00T"),
        (-1500, "-1.50K"),
    ],
)
def test_counts(n, text):
    assert count_text(n) == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(bytes_text(1024**2 - 1), "1.00 MiB"), (bytes_text(1023.7), "1.00 KiB"), (count_text(999_999), "1.00M")],
)
def test_rounding_up_reaches_the_next_unit(text, wanted):
    assert text == wanted


TABLE = """\
name   bytes
─────  ─────
embed      4
l        128"""


def test_table():
    assert table(["name", "bytes"], [["embed", "4"], ["l", "128"]], right=(1,)) == TABLE


def test_a_table_has_no_trailing_blanks():
    lines = table(["name", "note"], [["a", ""], ["b", "long"]]).splitlines()
    assert [line.rstrip() for line in lines] == lines
    assert lines[2] == "a"


def test_a_table_of_nothing_is_its_header():
    assert table(["a", "bc"], []) == "a  bc\n─  ──"


def test_a_ragged_table_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        table(["a"], [["1", "2"]])


def layers(*numbers: int) -> list[str]:
    return [f"layers.{n}" for n in numbers]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([], []),
        (["embed", "head"], ["embed", "head"]),
        (["embed", "embed"], ["embed", "embed"]),
        (layers(3), ["layers.3"]),
        (layers(0, 1, 2), ["layers.0 … layers.2 (3)"]),
        (layers(9, 10, 11), ["layers.9 … layers.11 (3)"]),
        (layers(0, 2, 4), ["layers.0 … layers.4, every 2nd (3)"]),
        (layers(0, 3, 6), ["layers.0 … layers.6, every 3rd (3)"]),
        (layers(0, 4), ["layers.0 … layers.4, every 4th (2)"]),
        (layers(0, 1, 5, 6), ["layers.0 … layers.1 (2)", "layers.5 … layers.6 (2)"]),
        (["embed", *layers(0, 1), "head"], ["embed", "layers.0 … layers.1 (2)", "head"]),
        (["a.0", "b.1", "b.2"], ["a.0", "b.1 … b.2 (2)"]),
        (["a.x", "a.y"], ["a.x", "a.y"]),
        (["0", "1"], ["0 … 1 (2)"]),
        (["a", "a.0"], ["a", "a.0"]),
    ],
)
def test_spans(names, short):
    assert spans(names) == short


@given(st.lists(st.integers(0, 40), unique=True))
def test_spans_keep_count(numbers):
    """Every name is in exactly one span: the counts in brackets, and the lone names, add up."""
    shown = spans(layers(*sorted(numbers)))
    assert sum(int(s.rpartition("(")[2][:-1]) if s.endswith(")") else 1 for s in shown) == len(numbers)


@pytest.mark.parametrize("names", [layers(2, 1, 0), layers(1, 1), layers(0, 21, 42)])
def test_spans_are_english(names):
    assert not any(word in span for span in spans(names) for word in ("every -", "every 0", "21th"))


@pytest.mark.parametrize(
    ("word", "ending"),
    [("zero4", "; did you mean 'zero1'?"), ("hybird", "; did you mean 'hybrid'?"), ("qqq", ""), ("", "")],
)
def test_nearest(word, ending):
    assert nearest(word, ["zero1", "hybrid"]) == ending
