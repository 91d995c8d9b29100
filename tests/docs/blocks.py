"""The blocks of code on the pages: what they are, and what their commands are."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]

_FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a page."""

    page: str
    #: Of its first line of code; from 1.
    line: int
    #: What stands behind the backticks.
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def statements(self) -> list[str]:
        """Of the shell: lines, with those that end in a backslash joined, without comments and blank lines.

        Of a terminal session only what stands behind a prompt.
        """
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(*languages: str) -> Iterator[Block]:
    """Those in any of the languages, page by page."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        for found in _FENCED.finditer(text):
            if found[1] in languages:
                yield Block(page, text[: found.start(2)].count("\n") + 1, found[1], found[2])
