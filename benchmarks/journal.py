"""What was measured so far, on disk, so that a run that was cut off goes on where it was."""

import json
from pathlib import Path
from typing import TypedDict

from benchmarks.table import Samples, Series


class _Round(TypedDict):
    stage: str
    number: int
    samples: list[Series]


class Journal:
    """Rounds of stages, one JSON line each, below a line that says what was measured.

    Args:
        path: the file; it is begun anew unless it has the same `subject`.
        subject: commit and options. Rounds are put together only if it is equal.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self._path = path
        self._rounds: dict[tuple[str, int], list[Series]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"subject": subject})
        lines = path.read_text().splitlines() if path.exists() else []
        if lines[:1] == [header]:
            self._read(lines[1:])
        path.write_text(header + "\n")
        for (stage, number), samples in self._rounds.items():
            self._append({"stage": stage, "number": number, "samples": samples})

    def has(self, stage: str, number: int) -> bool:
        return (stage, number) in self._rounds

    def record(self, stage: str, number: int, samples: Samples) -> None:
        """One whole round: all conditions, in turns."""
        round_: _Round = {"stage": stage, "number": number, "samples": samples.to_json()}
        self._append(round_)
        self._rounds[stage, number] = round_["samples"]

    def samples(self, stage: str) -> Samples:
        """Of all rounds of a stage."""
        found = Samples()
        for (name, _), rows in sorted(self._rounds.items()):
            if name == stage:
                found.extend(Samples.from_json(rows))
        return found

    def finish(self) -> None:
        """Everything was measured; the next run begins anew."""
        self._path.unlink()

    def _append(self, round_: _Round) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(round_) + "\n")

    def _read(self, lines: list[str]) -> None:
        for line in lines:
            try:
                round_: _Round = json.loads(line)
            except json.JSONDecodeError:  # the last line, cut off in the middle
                continue
            self._rounds[round_["stage"], round_["number"]] = round_["samples"]
