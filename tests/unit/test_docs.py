"""What the documentation names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: `file.py`, `file.py:function` and `file.py:Class.method` between backticks.
SOURCE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def definitions(path: Path) -> set[str]:
    """Names of the functions and classes of a module, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, FUNCTIONS)}
        elif isinstance(node, FUNCTIONS):
            found.add(node.name)
    return found


def walk_through_a_request() -> list[tuple[str, str]]:
    """(file, name or "") of every step in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## One request, step by step")[1].split("\n## ")[0]
    return SOURCE.findall(section)


def fault_rows() -> list[list[str]]:
    """Cells of the rows of docs/fault-cases.md."""
    lines = (ROOT / "docs" / "fault-cases.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return rows[1:]


@pytest.mark.parametrize(("file", "name"), walk_through_a_request())
def test_every_step_of_the_walk_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file()
    assert not name or name in definitions(ROOT / file)


def test_the_walk_names_files_at_every_step() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## One request, step by step")[1].split("\n## ")[0]
    steps = re.split(r"^\d+\. ", section, flags=re.M)[1:]
    assert len(steps) > 5
    assert all(SOURCE.search(step) for step in steps)


@pytest.mark.parametrize("row", fault_rows(), ids=lambda row: row[0].split(",")[0])
def test_every_fault_has_tests_that_exist(row: list[str]) -> None:
    reports, fault, tests = row
    assert re.fullmatch(r"(?:[\w./-]*#\d+(?:, )?)+", reports)
    assert len(fault.split()) <= 10
    named = TEST.findall(tests)
    assert named
    assert len(named) == tests.count("`") // 2
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert name in definitions(ROOT / file), f"{file}::{name}"
        assert name.startswith("test_")


def test_the_examples_of_the_prose_exist() -> None:
    """Files that docs/fault-cases.md names outside its table."""
    text = (ROOT / "docs" / "fault-cases.md").read_text().split("\n| ")[0]
    for file, _ in SOURCE.findall(text):
        assert (ROOT / file).is_file()
