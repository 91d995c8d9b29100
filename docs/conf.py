"""Sphinx builds these pages; every warning is an error, so that a broken link or anchor fails `make check`.

The pages are plain Markdown that reads the same in the repository: the navigation is made of the lists of links in
index.md, and links out of docs/ become downloads of the file that they name.
"""

import re
from collections.abc import Iterator

from sphinx.application import Sphinx

project = "moerelay"
author = "the moerelay authors"
extensions = ["myst_parser"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = "moerelay"
html_show_copyright = False
html_show_sphinx = False
#: Headings down to this level are anchors, spelled as the repository's pages spell them.
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]
#: Blocks are copied and run as they are; quotes and dashes stay what was written.
smartquotes = False
#: Blocks of JSON, TOML and the like may be shortened with "…", which no lexer knows.
suppress_warnings = ["misc.highlighting_failure"]
nitpicky = True

_PAGE = re.compile(r"\]\(([\w./-]+)\.md\)")
#: A link to a Markdown file above the page's folder.
_ABOVE = re.compile(r"\]\(((?:\.\./)+)([\w./-]+\.md)(?:#[\w-]+)?\)")


def _navigation(text: str) -> Iterator[str]:
    """One hidden toctree per section of an index that lists pages; the first link of a line of a table is the page."""
    for section in re.split(r"^## ", text, flags=re.M):
        title, _, body = section.partition("\n")
        pages = [found[1] for line in body.splitlines() if line.startswith("|") and (found := _PAGE.search(line))]
        if pages:
            caption = [] if title.startswith("# ") else [f":caption: {title}"]
            yield "\n".join(["```{toctree}", ":hidden:", *caption, "", *pages, "```", ""])


def _prepare(app: Sphinx, docname: str, content: list[str]) -> None:
    folder, _, name = docname.rpartition("/")
    depth = len(folder.split("/")) if folder else 0

    def outside(link: re.Match[str]) -> str:
        # MyST takes every .md for a page of its own unless told that it is a file.
        return f"](path:{link[1]}{link[2]})" if link[1].count("../") > depth else link[0]

    content[0] = _ABOVE.sub(outside, content[0])
    if name == "index":
        content[0] += "\n" + "\n".join(_navigation(content[0]))


def setup(app: Sphinx) -> None:
    app.connect("source-read", _prepare)
