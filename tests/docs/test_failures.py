"""docs/failures.md names every error that a client can see, in the words that the code has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import HTTP_TABLE
from common.sampling import FinishReason
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "failures.md").read_text()
SOURCES = ("common", "router", "decode_worker", "prefill_worker")
#: A message, in the second column of the table of statuses.
MESSAGE = re.compile(r"^\| (?:\d{3} `\w+`)? ?\| (`[^|]*`)", re.M)


def quoted() -> list[str]:
    section = PAGE.split("## Statuses")[1].split("\n## ")[0]
    return [message for cell in MESSAGE.findall(section) for message in re.findall(r"`([^`]+)`", cell)]


def texts(path: Path) -> Iterator[str]:
    """The string literals of a module, with … for what f-strings put in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def spoken() -> set[str]:
    """What the processes can say."""
    return {text for folder in SOURCES for path in (ROOT / folder).rglob("*.py") for text in texts(path)}


def says(text: str, message: str) -> bool:
    """Whether a text of the code can read as the message, each … of which stands for something."""
    pattern = ".*".join(map(re.escape, message.split("…")))
    return re.fullmatch(pattern, text, re.S) is not None


@pytest.mark.parametrize("message", quoted())
def test_messages_are_in_the_code(message: str, spoken: set[str]) -> None:
    assert any(says(text, message) for text in spoken)


def test_many_messages_are_quoted() -> None:
    assert len(quoted()) > 15


def test_every_error_has_a_row() -> None:
    for status, kind in set(HTTP_TABLE.values()):
        assert f"| {status} `{kind}` |" in PAGE


def test_every_finish_reason_is_explained() -> None:
    section = PAGE.split("## Finish reasons")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == {str(reason.value) for reason in FinishReason}
