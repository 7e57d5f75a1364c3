"""The documentation builds as a site, strictly: every page in the navigation, no link broken."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="pip install 'fullshard[docs]'")
pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "recipes", "examples", "benchmarks")


def build(here: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-c", "docs", ".", "site"]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=600, check=False)


def test_the_site_is_built_and_damage_is_found(tmp_path):
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name)
    for file in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "fullshard").symlink_to(ROOT / "fullshard")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "site/README.html").read_text()
    assert all(f">{title}<" in front for title in ("Start", "Guides", "Explain", "Reference", "Evidence"))
    assert "README.html" in (tmp_path / "site/index.html").read_text()

    (tmp_path / "docs/guides/stray.md").write_text("# Stray\n\n[a](gone.md) and [b](data.md#gone)\n")
    done = build(tmp_path)
    assert done.returncode != 0
    for said in ("isn't included in any toctree", "gone.md", "'gone'"):
        assert said in done.stderr
