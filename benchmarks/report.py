"""The pages, pictures and files that tell what a run measured."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.chart import bars
from benchmarks.markers import rewrite
from benchmarks.spread import Spread
from benchmarks.stages import conversation
from benchmarks.stages.names import AGGREGATED, AGGREGATED_OFF, AGGREGATED_SERVER, DISAGGREGATED, PEER, PEER_SERVER
from benchmarks.table import Samples
from benchmarks.targets import RAW, Results, Target, table

PAGE = Path("docs/benchmarks.md")
DATA = Path("docs/benchmarks")

LEGEND = """× is a ratio of values measured in turns, median (lowest–highest). In the tables below the targets it is to
the condition that has none, and above 1 is better; the values themselves follow it, median (lowest–highest)."""

#: Title and baseline of each stage's table, in the order of the page.
SECTIONS = {
    "serving": ("Serving", PEER),
    "rows": ("Cost of rows", AGGREGATED_OFF),
    "mixed": ("Mixed load", PEER),
    "startup": ("Start and memory", PEER_SERVER),
    "memory": ("Memory of a worker", AGGREGATED_SERVER),
    "conversation": ("A long conversation", conversation.ROWS_OFF),
    "handoff latency": ("Handoff: latency", DISAGGREGATED),
    "handoff": ("Handoff: rate", RAW),
    "exactness": ("Cost of exactness", "inexact"),
    "router": ("Router", "raw aiohttp writer"),
    "idle": ("Servers that nobody asks anything", PEER_SERVER),
}


def markdown(results: Results, targets: list[Target], about: Mapping[str, object]) -> str:
    """The generated part of the page."""
    lines = [sentence(about), "", LEGEND, "", "### Targets", "", *table(results, targets)]
    if serving_bars(results.of("serving")):
        lines += ["", "### Serving beside vLLM", "", "![How many times as fast as vLLM](benchmarks/serving.svg)"]
    lines += stage_tables(results.stages)
    return "\n".join(lines)


def stage_tables(stages: Mapping[str, Samples]) -> Iterator[str]:
    """A heading and a table for each stage that has samples."""
    for stage, (title, baseline) in SECTIONS.items():
        samples = stages.get(stage)
        if samples and samples.conditions:
            first = baseline if baseline in samples.conditions else samples.conditions[0]
            yield from ("", f"### {title}", "", *samples.table(first))


def sentence(about: Mapping[str, object]) -> str:
    """Commit and machine, in one paragraph."""
    machine = about["machine"]
    assert isinstance(machine, Mapping)
    peer = f", vLLM {about['vllm']}" if about.get("vllm") else ""
    warning = f" **{about['warning']}.**" if about.get("warning") else ""
    return (
        f"Measured on {about['date']} at commit `{about['commit']}`: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {', '.join(machine['flags'])}, huge pages {machine['huge_pages']}, Linux "
        f"{machine['kernel']}, Python {machine['python']}, torch {machine['torch']}{peer}; load average before "
        f"it began {machine['load_average']}.{warning}"
    )


def serving_bars(samples: Samples) -> str:
    """The picture of the serving stage; empty without a peer."""
    ours = (AGGREGATED, AGGREGATED_OFF, DISAGGREGATED)
    groups: dict[str, dict[str, Spread]] = {}
    for quantity in samples.quantities(PEER):
        found = {
            name: samples.speed_ratio(name, PEER, quantity) for name in ours if samples.values(name, quantity.name)
        }
        groups[quantity.name] = found
    return bars("How many times as fast as vLLM (1), in one run", groups) if any(groups.values()) else ""


def write(root: Path, results: Results, targets: list[Target], about: Mapping[str, object]) -> None:
    """The page's generated part, the picture and the JSON file, below the repository's root."""
    (root / DATA).mkdir(parents=True, exist_ok=True)
    stages = {name: samples.to_json() for name, samples in results.stages.items()}
    write_json(root / DATA / "bench.json", {**about, "stages": stages})
    if picture := serving_bars(results.of("serving")):
        (root / DATA / "serving.svg").write_text(picture)
    rewrite(root / PAGE, "bench", markdown(results, targets, about))


def write_json(path: Path, value: object) -> None:
    """Readable, with no more digits than a measurement has."""
    path.write_text(json.dumps(rounded(value), indent=1, ensure_ascii=False) + "\n")


def rounded(value: object) -> object:
    """The same with floats of five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value
