"""The benchmarks of single parts, each a command of its own that writes JSON."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.table import Quantity, Samples

#: Far more than any of them takes.
TIMEOUT_S = 900.0


class PartStage:
    """Runs `python -m MODULE ARGUMENTS… --json FILE` and reads the file.

    Args:
        read: samples out of that JSON.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], num_rounds: int, read: Callable[[Any], Samples]
    ) -> None:
        self.name = name
        self.num_rounds = num_rounds
        self._command = (sys.executable, "-m", module, *arguments)
        self._read = read

    async def measure(self, number: int) -> Samples:
        """See `Stage`."""
        with tempfile.TemporaryDirectory() as directory:
            result = Path(directory) / "result.json"
            process = await asyncio.create_subprocess_exec(*self._command, f"--json={result}", stdout=sys.stderr)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    code = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
            if code:
                raise RuntimeError(f"{' '.join(self._command)} ended with code {code}")
            return self._read(json.loads(result.read_text()))


def read_router(report: Any) -> Samples:
    """Of `benchmarks.router`: CPU time per event under "router" and under "raw writer"."""
    samples = Samples()
    for cost in report["cost"]:
        quantity = Quantity(cost["shape"]["name"], "µs of CPU per event", higher_is_better=False)
        for condition, key in (("router", "router"), ("raw aiohttp writer", "raw")):
            for run in cost[key]:
                samples.add(condition, quantity, run["cpu_us_per_event"])
    return samples


def read_handoff(report: Any) -> Samples:
    """Of `benchmarks.handoff`, which has samples per transport: quantities are named after both."""
    samples = Samples()
    for transport, rows in report.items():
        for condition, quantity, value in Samples.from_json(rows).each():
            samples.add(condition, replace(quantity, name=f"{quantity.name}, {transport}"), value)
    return samples


def read_exactness(report: Any) -> Samples:
    """Of `benchmarks.exactness`, which has samples per dtype: those of bf16, in which models are served."""
    return Samples.from_json(report["bfloat16"])
