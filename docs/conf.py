"""The documentation as a site: the Markdown files of the repository as they are, with docs/README.md as the navigation.

Read by Sphinx, from the repository's root: `make docs`.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results/README"
LINK = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\.md\)", re.M)

project = "fullshard"
extensions = ["myst_parser"]
root_doc = "README"
# No other Markdown file is a page. One that is here and not in docs/README.md is a warning, and warnings are errors.
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**.md",
    "recipes/README.md",
    "examples/README.md",
    "benchmarks/results/*.md",
]
myst_heading_anchors = 4  # as GitHub makes them
suppress_warnings = ["misc.highlighting_failure"]  # `…` stands for left-out output
html_theme = "furo"
html_title = "fullshard"
html_show_copyright = False
html_show_sphinx = False


def sections() -> list[tuple[str, list[str]]]:
    """The navigation: titles of docs/README.md with the documents of their lists."""
    parts = re.split(r"^## +(.*)$", (ROOT / "docs/README.md").read_text(), flags=re.M)[1:]
    found = []
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        found.append((title, [f"{name} <{_document(path)}>" for name, path in LINK.findall(text)]))
    found[0][1].append("All pages <docs/README>")
    return found


def _document(path: str) -> str:
    return str((ROOT / "docs" / path).resolve().relative_to(ROOT))


def add_navigation(app: Any, document: str, source: list[str]) -> None:
    """Append the navigation to the front page, where Sphinx looks for it. Single results stand under that of all results."""
    if document == root_doc:
        source[0] = "\n\n".join([source[0], *(toctree(title, pages) for title, pages in sections())])
    if document == RESULTS:
        found = sorted(path.stem for path in (ROOT / RESULTS).parent.glob("*.md") if path.stem != "README")
        source[0] = "\n\n".join([source[0], toctree("", found)])


def toctree(title: str, pages: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", *([f":caption: {title}"] if title else []), "", *pages, "```"])


def write_index(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        target = '<meta http-equiv="refresh" content="0; url=README.html">'
        page = f'<!doctype html><meta charset="utf-8">{target}<title>fullshard</title>'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Any) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", write_index)
