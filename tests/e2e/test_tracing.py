"""`moerelay up --otlp-traces-endpoint file:…`: what three processes write becomes one tree, and their logs name it."""

import json
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.cluster import Client, running_cluster
from tests.e2e.conftest import FLAGS
from tests.integration.traces import traces_in


@pytest.mark.cluster
@pytest.mark.xdist_group("tracing")
async def test_a_request_is_one_tree_over_three_processes(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    flags = (f"--otlp-traces-endpoint=file:{path}", "--log-level=debug", "--log-format=json")
    with running_cluster(tiny_model, tmp_path, *FLAGS, *flags) as cluster:
        async with aiohttp.ClientSession() as session:
            answer = await Client(session, cluster.url).generate(
                [*range(3, 43)], stream=True, max_tokens=20, request_id="mine"
            )
        assert answer.status == 200
    # All of them have ended, and with that sent what they had.
    [trace] = traces_in(path)
    assert {(span.name.partition(".")[0], span.service) for span in trace.spans} == {
        ("llm_request", "moerelay-router"),
        ("router", "moerelay-router"),
        ("prefill", "moerelay-prefill"),
        ("handoff", "moerelay-prefill"),
        ("handoff", "moerelay-decode"),
        ("decode", "moerelay-decode"),
    }
    assert ("handoff.send", "handoff.receive", "moerelay-decode") in trace.edges()
    assert ("", "llm_request", "moerelay-router") in trace.edges()
    assert trace.root.attributes["gen_ai.request.id"] == "mine"
    lines = [json.loads(line) for line in cluster.log.read_text().splitlines() if line.startswith("{")]
    told = [line for line in lines if str(line.get("request_id", "")).startswith("mine")]
    assert {line["process"] for line in told} == {"router", "prefill-0", "decode-0"}
    assert {line["trace_id"] for line in told} == {trace.root.trace_id}
