"""Links of all Markdown files lead to files and headings that are there, and every page is in the navigation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = {".venv", "build", "dist", "runs", ".pytest_cache"}
PAGES = [p for p in sorted(ROOT.rglob("*.md")) if not SKIPPED & set(p.relative_to(ROOT).parts)]
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2`* *$", re.M | re.S)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#+ +(.*?)[ \t]*$", re.M)


def prose(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """The headings' anchors as GitHub makes them."""
    found: list[str] = []
    for title in HEADING.findall(prose(text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def broken(page: Path, text: str) -> list[str]:
    """The links of a page's text that lead nowhere."""
    targets = [t for t in LINK.findall(prose(text)) if not re.match(r"\w+:", t)]
    return [t for t in targets if not leads_somewhere(page, *t.partition("#")[::2], text)]


def leads_somewhere(page: Path, path: str, anchor: str, text: str) -> bool:
    file = page.parent / path if path else page
    if not file.exists():
        return False
    return not anchor or anchor in anchors(file.read_text() if path else text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    assert broken(page, page.read_text()) == []


def test_every_page_is_in_the_navigation():
    listed = {(ROOT / "docs" / t).resolve() for t in LINK.findall((ROOT / "docs/README.md").read_text())}
    assert [p for p in PAGES if p.is_relative_to(ROOT / "docs") and p not in listed] == [ROOT / "docs/README.md"]


def test_planted_links_are_found():
    page = ROOT / "docs/start.md"
    text = "# A title\n[a](#a-title) [b](#none) [c](gone.md) [d](../README.md#install) [e](../README.md#gone) [f](https://x.y)"
    assert broken(page, text) == ["#none", "gone.md", "../README.md#gone"]
    assert broken(page, "```\n[a](gone.md)\n```\n") == []
    assert anchors("# A `b`: c\n# A\n## A\n") == {"a-b-c", "a", "a-1"}
