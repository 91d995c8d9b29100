"""`moerelay status`: a running cluster at a glance."""

import argparse
import asyncio
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.text import Text

from common.arguments import ArgumentParser
from deploy.arguments import add_api_key_file, first_key, url
from deploy.client import ClusterClient, Json
from deploy.terminal import stdout

#: Counters whose growth is shown, by what it is called.
_RATES = {
    "requests_per_s": "moerelay_router_requests_total",
    "prompt_tokens_per_s": "moerelay_prompt_tokens_total",
    "generated_tokens_per_s": "moerelay_generation_tokens_total",
    "errors_per_s": "moerelay_router_errors_total",
}

_STYLES = {"healthy": "green", "suspect": "yellow", "dead": "red"}
_HEAD = ("worker", "role", "state", "running", "waiting", "handoffs", "KV used", "weights", "note")


@dataclass(frozen=True, slots=True)
class Sample:
    """What the cluster said at one moment."""

    at_s: float
    cluster: Json
    #: Sums over all samples of each counter.
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Growth per second between two samples."""

    requests_per_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    errors_per_s: float

    @classmethod
    def between(cls, before: Sample, after: Sample) -> "Rates":
        """A counter that fell began anew: its process was replaced."""
        seconds = max(after.at_s - before.at_s, 1e-9)
        grown = {
            field: max(0.0, after.counters.get(name, 0.0) - before.counters.get(name, 0.0)) / seconds
            for field, name in _RATES.items()
        }
        return cls(**grown)


def command_line() -> ArgumentParser:
    """The flags of this command."""
    parser = ArgumentParser("moerelay status", "Show a running cluster: its workers, their load, and its rates.")
    parser.add_argument("--url", type=url, default="http://127.0.0.1:8000", help="the router (default: %(default)s)")
    add_api_key_file(parser)
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, help="seconds that rates are measured over (default: %(default)s)"
    )
    parser.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object per sample, for programs")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time that could be waited for; it must be more than 0")
    return value


def main(argv: Sequence[str]) -> int:
    """Exit code 1 if the cluster takes no requests. Raises MoerelayError if it does not answer."""
    arguments = command_line().parse_args(argv)
    client = ClusterClient(arguments.url, api_key=first_key(arguments.api_key_file))
    return asyncio.run(show(client, stdout(), arguments.interval, arguments.watch, arguments.json))


async def show(client: ClusterClient, console: Console, interval_s: float, watch: bool, as_json: bool) -> int:
    """Opens the client; two samples, or more of them with `watch`."""
    async with client:
        before = await sample(client)
        while True:
            await asyncio.sleep(interval_s)
            after = await sample(client)
            rates = Rates.between(before, after)
            if as_json:
                console.out(json.dumps(after.cluster | {"rates": asdict(rates)}), highlight=False)
            else:
                if watch and console.is_terminal:
                    console.clear()
                for line in lines(after.cluster, rates):
                    console.print(line, soft_wrap=True)
            if not watch:
                return 0 if after.cluster["router"]["ready"] else 1
            before = after


async def sample(client: ClusterClient) -> Sample:
    """Raises MoerelayError."""
    cluster, text = await asyncio.gather(client.get("/cluster"), client.get_text("/metrics"))
    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            if each.name in _RATES.values():
                counters[each.name] = counters.get(each.name, 0.0) + each.value
    return Sample(time.monotonic(), cluster, counters)


def lines(cluster: Json, rates: Rates) -> Iterator[Text]:
    """For people: the router, then a line per worker."""
    router = cluster["router"]
    ready = Text("ready", "green") if router["ready"] else Text("not ready", "red")
    extras = [word for word in ("draining", "fallback") if router[word]]
    yield Text.assemble(
        f"{router['model']}: ", ready, *(f", {word}" for word in extras), f", {router['in_flight']} requests in flight"
    )
    if (fix := _paused(cluster["workers"])) is not None:
        yield Text(fix, "yellow")
    yield Text(
        f"{rates.requests_per_s:.1f} requests/s, {rates.prompt_tokens_per_s:.0f} prompt and "
        f"{rates.generated_tokens_per_s:.0f} generated tokens/s, {rates.errors_per_s:.1f} errors/s"
    )
    rows = [_HEAD, *(_row(worker) for worker in cluster["workers"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        line = Text(style="bold" if row is _HEAD else "")
        for cell, width in zip(row, widths, strict=True):
            line.append(f"{cell:<{width}}  ", _STYLES.get(cell, ""))
        line.rstrip()
        yield line


def _paused(workers: Sequence[Json]) -> str | None:
    """How to go on, if somebody has paused workers or put them to sleep."""
    if any(worker["sleep_level"] for worker in workers):
        return "asleep: POST /wake_up on the control port"
    if any(worker["pause"] == "paused" for worker in workers):
        return "paused: POST /resume on the control port"
    return None


def _row(worker: Json) -> tuple[str, ...]:
    return (
        _name(worker),
        worker["role"] or "?",
        worker["state"],
        *(_number(worker[name]) for name in ("running", "waiting", "handoffs")),
        _share(worker["kv_blocks_used"], worker["kv_blocks_total"]),
        _number(worker["weight_version"]),
        _note(worker),
    )


def _name(worker: Json) -> str:
    """Its id; where that is made of an address that a name stood for, the name with the address."""
    # Routers of before know no sources.
    scheme, _, source = worker.get("source", "").partition("://")
    if scheme == "dns" and worker["id"].endswith(worker["address"]):
        return f"{source.rpartition(':')[0]} ({worker['address']})"
    return str(worker["id"])


def _number(value: object) -> str:
    return "-" if value is None else str(value)


def _share(used: int | None, total: int | None) -> str:
    return "-" if used is None or not total else f"{100 * used / total:.0f}%"


def _note(worker: Json) -> str:
    """Why it is not used, or what else is not as usual."""
    notes = [worker["refused"] or ""]
    if worker["pause"] not in (None, "running"):
        notes.append(worker["pause"])
    if worker["sleep_level"]:
        notes.append(f"asleep at level {worker['sleep_level']}")
    if worker["exact"] is False:
        notes.append("not exact")
    return ", ".join(note for note in notes if note)
