"""Copies the numbers that README.md shows out of docs/benchmarks.md; with --check fails if they differ."""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- numbers begin: scripts/generate_readme_numbers.py -->\n", "<!-- numbers end -->"

#: The columns of the tables that are read.
AGGREGATED, SEPARATE = "moerelay aggregated, rows on", "moerelay 1P+1D, rows on"
VLLM = "vLLM, rows off"


class Tables:
    """Cells of the tables of docs/benchmarks.md, by heading, row and column."""

    def __init__(self, text: str) -> None:
        self._text = text

    def cell(self, heading: str, row: str, column: str) -> str:
        """Exits with a sentence if there is no such cell: the page was rearranged."""
        table = self._text.partition(f"### {heading}\n")[2].partition("\n#")[0]
        lines = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"
        ]
        for cells in lines:
            if cells[0] == row and column in lines[0]:
                return cells[lines[0].index(column)]
        sys.exit(f"docs/{BENCHMARKS.name} has no {row!r} of {column!r} under {heading!r}")

    def ratio(self, heading: str, row: str, column: str) -> str:
        """'×1.31 (1.11–1.62); 484 (…)' → '1.31 ×'."""
        return f"{_first(self.cell(heading, row, column).removeprefix('×'))} ×"

    def value(self, heading: str, row: str, column: str) -> str:
        """'×1.31 (1.11–1.62); 484 (…)' → '484'."""
        return _first(self.cell(heading, row, column).rpartition("; ")[2])


def _first(cell: str) -> str:
    return cell.split(" ")[0]


def numbers(tables: Tables) -> str:
    """The table of README.md. Times are compared as speeds: above 1 is faster."""
    lines = [
        "| beside vLLM, rows off | moerelay, one worker, rows on | 1 prefill + 1 decode worker, rows on |",
        "|---|---|---|",
    ]
    for row, text in (
        ("TTFT 512, ms", "first token of a 512-token prompt, how many times as fast"),
        ("TTFT 2048, ms", "of a 2048-token prompt"),
        ("decode C=1, tok/s", "tokens per second, 1 stream"),
        ("decode C=4, tok/s", "4 streams"),
        ("decode C=16, tok/s", "16 streams"),
    ):
        shown = [tables.ratio("Serving", row, column) for column in (AGGREGATED, SEPARATE)]
        lines.append(f"| {text} | {shown[0]} | {shown[1]} |")
    row = "mixed: gap p99, ms"
    vllm, one, two = (tables.value("Mixed load", row, column) for column in (VLLM, AGGREGATED, SEPARATE))
    lines.append(f"| slowest 1 % of token gaps while long prompts come: vLLM {vllm} ms | {one} ms | {two} ms |")
    row = "start until it serves, s"
    lines.append(_start_line(tables, row))
    return "\n".join(lines) + "\n"


def _start_line(tables: Tables, column: str) -> str:
    vllm, one, two = (
        tables.value("Start and memory", row, column) for row in ("vLLM", "moerelay aggregated", "moerelay 1P+1D")
    )
    return f"| start until it serves: vLLM {vllm} s | {one} s | {two} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    check: bool = parser.parse_args().check
    text = README.read_text()
    pattern = re.compile(re.escape(BEGIN) + "(.*?)" + re.escape(END), re.S)
    if not pattern.search(text):
        sys.exit(f"{README.name} lacks the line {BEGIN.strip()!r} or {END!r}")
    wanted = pattern.sub(lambda _: BEGIN + numbers(Tables(BENCHMARKS.read_text())) + END, text)
    if not check:
        README.write_text(wanted)
    elif wanted != text:
        sys.exit(f"the numbers of {README.name} are not those of docs/{BENCHMARKS.name}; run `make proto`")


if __name__ == "__main__":
    main()
