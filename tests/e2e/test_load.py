"""The load test against a real cluster: closed loop, open loop, and a trace that ends by itself."""

import asyncio
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.cluster import Client, Cluster
from tests.e2e.test_disconnect import assert_baseline

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("disaggregated"),
    pytest.mark.skipif(find_spec("locust") is None, reason="needs the extra `load`"),
]

ROOT = Path(__file__).parents[2]
SUMMARY = re.compile(r"^load: (\d+) requests, (\d+) failures$", re.M)


async def load(cluster: Cluster, *flags: str) -> tuple[int, str]:
    """Exit code and what was printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", "deploy/locustfile.py", "--headless", "--only-summary"),
        *("--host", cluster.url, "--output-tokens", "4:12", *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, errors = await asyncio.wait_for(process.communicate(), 240)
    assert b"Traceback" not in errors, errors.decode()
    assert process.returncode is not None
    return process.returncode, printed.decode()


@pytest.mark.parametrize("arrivals", [(), ("--arrival-rate", "10")], ids=["closed", "open"])
async def test_nothing_fails_under_load(disaggregated: Cluster, client: Client, arrivals: tuple[str, ...]) -> None:
    await assert_baseline(client)
    before = await client.metric("moerelay_generation_tokens_total")
    flags = ("-u", "6", "-r", "6", "-t", "10s", "--prompt-tokens", "1:60", *arrivals)
    code, printed = await load(disaggregated, *flags)
    found = SUMMARY.search(printed)
    assert found, printed
    assert (code, found[2]) == (0, "0"), printed
    assert int(found[1]) > 5
    rows = {line[:22].strip(): line.split() for line in printed.splitlines()}
    for name in ("time to first token", "between tokens", "whole request"):
        durations = [float(word) for word in rows[name] if re.fullmatch(r"[\d.]+", word)]
        assert len(durations) == 5
        assert durations == sorted(durations)
    await assert_baseline(client)
    generated = await client.metric("moerelay_generation_tokens_total") - before
    assert 4 * int(found[1]) <= generated <= 12 * int(found[1])


async def test_what_two_processes_send_is_summed_up(disaggregated: Cluster, client: Client) -> None:
    """To the last token of the streams that are under way when the time is over."""
    await assert_baseline(client)
    before = await client.metric("moerelay_generation_tokens_total")
    many = ("-u", "64", "-r", "64", "-t", "3s", "--prompt-tokens", "1:20", "--output-tokens", "100")
    code, printed = await load(disaggregated, "--processes", "2", *many)
    found = SUMMARY.search(printed)
    assert found, printed
    assert (code, found[2]) == (0, "0"), printed
    assert int(found[1]) >= 64
    await assert_baseline(client)
    assert await client.metric("moerelay_generation_tokens_total") - before == 100 * int(found[1])
    assert "requests in 0.0 s" not in printed


async def test_a_trace_is_replayed_once(disaggregated: Cluster, client: Client, tmp_path: Path) -> None:
    """All seven prompts share their block, of which the context holds a part."""
    lines = [
        {"timestamp": 100 * i, "input_length": 80 + i, "output_length": 3 + i, "hash_ids": [4711]} for i in range(7)
    ]
    lines[-1]["output_length"] = 90
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = await client.metric("moerelay_prefix_cache_hit_tokens_total", "prefill")
    code, printed = await load(disaggregated, "-u", "3", "-r", "3", "--trace", str(tmp_path / "trace.jsonl"))
    assert code == 0, printed
    assert "load: 7 requests, 0 failures" in printed
    assert "1 requests of the trace were cut to the context" in printed
    assert await client.metric("moerelay_prefix_cache_hit_tokens_total", "prefill") > before


async def test_prompts_that_cannot_fit_are_refused_before_anything_is_sent(disaggregated: Cluster) -> None:
    """And nobody waits for the end of the test to hear of it."""
    code, printed = await load(disaggregated, "-u", "1", "-t", "1h", "--prompt-tokens", "128")
    assert code == 2
    assert not SUMMARY.search(printed)
