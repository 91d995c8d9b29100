"""The site is built from plain pages, and what is broken in them fails the build, as docs/conf.py wants it."""

import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import ROOT

#: An index as the repository shows it: a table per section.
INDEX = "# Home\n\n## Start\n\n| page | about |\n|---|---|\n| [First](first.md) | one |\n"


def build(directory: Path, **pages: str) -> subprocess.CompletedProcess[str]:
    """Builds a site of these pages with the settings and the flags of `make docs`."""
    source = directory / "docs"
    source.mkdir()
    for name, text in pages.items():
        (source / f"{name}.md").write_text(text)
    [line] = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("BUILD_DOCS := ")]
    _, module, *flags = line.partition("python ")[2].split()
    flags = flags[: flags.index("-d")]
    command = [sys.executable, "-m", module, *flags, "-c", str(ROOT / "docs"), str(source), str(directory / "site")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_pages_become_a_site_with_navigation(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("")
    (tmp_path / "OTHER.md").write_text("# Other\n")
    links = "[a tool](../tool.py), [another](../OTHER.md), [below](#below)"
    done = build(tmp_path, index=INDEX, first=f"# First page\n\n{links}\n\n## Below\n")
    assert done.returncode == 0, done.stderr
    assert "First page" in (tmp_path / "site" / "index.html").read_text()
    assert {file.name for file in (tmp_path / "site" / "_downloads").rglob("*.*")} == {"tool.py", "OTHER.md"}


def test_pages_that_no_index_lists_fail_the_build(tmp_path: Path) -> None:
    done = build(tmp_path, index=INDEX, first="# First page\n", lost="# Lost page\n")
    assert done.returncode == 1
    assert "lost.md" in done.stderr


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    broken = {
        "[page](gone-page.md)": "gone-page.md",
        "[tool](../gone-tool.py)": "gone-tool.py",
        "[other](../GONE-OTHER.md)": "GONE-OTHER.md",
        "[here](#gone-here)": "gone-here",
        "[there](index.md#gone-there)": "gone-there",
        "![picture](gone-picture.svg)": "gone-picture.svg",
    }
    done = build(tmp_path, index=INDEX, first="\n\n".join(["# First page", *broken]))
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if "first.md" in line and "WARNING" in line]
    assert len(warnings) == len(broken)
    for name in broken.values():
        assert any(name in warning for warning in warnings), name
