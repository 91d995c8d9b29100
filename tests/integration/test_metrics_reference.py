"""docs/metrics.md lists exactly the metrics that a cluster shows, with their types and labels."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from common.engine.objectives import Objectives
from common.worker.core import WorkerCore
from decode_worker.self_check.checker import SelfCheck
from tests.integration.kit import fake_kit
from tests.integration.relay import WorkerPlan, running_relay

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) \| (\w*) \| (.+) \| (.*) \|$", re.M)

#: Of ZeroMQ sockets, and of keys; this cluster hands over in memory, without any.
OF_SOCKETS = {"moerelay_handoff_clients_refused_total", "moerelay_certificate_seconds_left"}

Described = dict[str, tuple[str, frozenset[str]]]


def documented() -> Described:
    """Type and labels by name, as the page has them."""
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) == PAGE.read_text().count("\n| `"), "a row that does not look like the others"
    names = [name for name, *_ in rows]
    assert len(set(names)) == len(names)
    return {name: (kind, frozenset(re.findall(r"\w+", labels))) for name, kind, labels, *_ in rows}


def checked(core: WorkerCore) -> SelfCheck:
    return SelfCheck(core, 1.0, max_tokens=64, files=None)


async def shown() -> tuple[Described, set[str]]:
    """What a cluster with everything switched on shows; and names of metrics that have no sample in it."""
    goals = Objectives(ttft_s=60.0, itl_s=60.0)
    decode = WorkerPlan(fake_kit(), objectives=goals, self_check=checked)
    async with running_relay(decode, WorkerPlan(fake_kit(), objectives=goals)) as relay:
        assert (await relay.client.generate([5, 6, 7], max_tokens=3, stream=True)).status == 200
        assert (await relay.client.generate([5], max_tokens=0)).status == 400
        async with relay.client.session.get(f"{relay.client.url}/metrics") as response:
            text = await response.text()
    found: Described = {}
    silent = set()
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        if name.startswith("process_"):  # the router's have none; those of workers get them from the router
            labels = frozenset()
        if not family.samples:
            silent.add(name)
        found[name] = (family.type, labels)
    return found, silent


async def test_the_page_lists_what_there_is() -> None:
    page, (cluster, silent) = documented(), await shown()
    assert page.keys() - cluster.keys() == OF_SOCKETS
    assert cluster.keys() <= page.keys()
    assert silent <= {"moerelay_discovery_workers", "moerelay_discovery_failing"}
    for name in cluster.keys() - silent:
        assert page[name] == cluster[name], name


def test_units_fit_the_names() -> None:
    for name, _, _, unit, *_ in ROW.findall(PAGE.read_text()):
        if "seconds" in name:
            assert unit == "s", name
        if "bytes" in name:
            assert unit == "bytes", name
        if name.endswith(("_tokens", "_tokens_total")):
            assert unit == "tokens", name
