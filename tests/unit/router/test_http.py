"""What every HTTP client may rely on: JSON errors, status codes, limits, ids, and the routes around generation."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config import RouterSettings
from common.errors import ConfigError
from router.app import create_app
from router.keys import MODEL
from tests.fakes.fake_workers import Script, description, expected_tokens
from tests.unit.router.cluster import GENERATE, running, strict_json

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}


async def test_unknown_routes_and_methods_are_json() -> None:
    async with running() as cluster:
        status, answer = await cluster.get("/nowhere")
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (404, "NotFoundError", 404)
        async with cluster.http.get(GENERATE, headers={"Accept": "text/html"}) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert (await response.json())["error"]["type"] == "MethodNotAllowedError"


async def test_bodies_above_the_limit() -> None:
    async with running(max_body_bytes=1000) as cluster:
        status, answer = await cluster.post(BODY | {"padding": "x" * 1000})
        assert (status, answer["error"]["type"]) == (413, "RequestTooLargeError")
        await cluster.canary()


async def test_messages_above_the_grpc_limit_are_an_error_not_a_hang() -> None:
    async with running(max_message_bytes=50) as cluster:
        status, answer = await cluster.post({"token_ids": [7] * 100, "sampling_params": {"max_tokens": 4}})
        # The heartbeat's answer is larger than 50 bytes too, so no worker is ever heard.
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")


async def test_model_names() -> None:
    async with running(served_model_name="tiny") as cluster:
        assert (await cluster.post(BODY | {"model": "tiny"}))[1]["model"] == "tiny"
        status, answer = await cluster.post(BODY | {"model": "other"})
        assert (status, answer["error"]["type"], answer["error"]["param"]) == (404, "NotFoundError", "model")
        _, models = await cluster.get("/v1/models")
        (card,) = models["data"]
        assert (models["object"], card["id"], card["max_model_len"]) == ("list", "tiny", 128)


@pytest.mark.parametrize("header", ["x" * 257, "x" * 10_000, "a b", "é"])
async def test_request_id_headers_that_cannot_be_used(header: str) -> None:
    async with running() as cluster:
        status, answer = await cluster.post(BODY, headers={"X-Request-Id": header})
        assert (status, answer["error"]["param"]) == (400, "request_id")


async def test_two_live_requests_with_one_id() -> None:
    script = Script(hold_after=1)
    async with running(script) as cluster:
        headers = {"X-Request-Id": "twin"}
        first = asyncio.ensure_future(cluster.post(BODY, headers=headers))
        await cluster.decode[0].wait_until(lambda: cluster.decode[0].num_chunks == 1)
        status, answer = await cluster.post(BODY | {"token_ids": [9]}, headers=headers)
        assert (status, answer["error"]["type"], answer["error"]["param"]) == (409, "ConflictError", "request_id")
        script.release.set()
        assert (await first)[1]["choices"][0]["token_ids"] == expected_tokens([5, 6, 7], 4)
        status, answer = await cluster.post(BODY | {"token_ids": [9]}, headers=headers)
        assert answer["choices"][0]["token_ids"] == expected_tokens([9], 4)


async def test_workers_never_see_one_id_twice() -> None:
    """A worker may hold an id for a moment after its call was cancelled; the client that comes back is not refused."""
    async with running() as cluster:
        for _ in range(2):
            assert (await cluster.post(BODY | {"request_id": "again"}))[0] == 200
        first, second = (request.request_id for request in cluster.decode[0].decode_requests)
    assert first != second
    assert first.startswith("again-0-")


async def test_probes_and_version() -> None:
    async with running() as cluster:
        assert await cluster.get("/live") == (200, {"status": "ok"})
        assert await cluster.get("/ready") == (200, {"status": "ok", "exact": True, "fallback": False})
        assert await cluster.get("/health") == (200, {"status": "ok", "exact": True, "fallback": False})
        assert list((await cluster.get("/version"))[1]) == ["version"]


async def test_cluster_view() -> None:
    script = Script(hold_after=1)
    async with running(script, prefill=1, decode=2) as cluster:
        request = asyncio.ensure_future(cluster.post(BODY))
        busy = cluster.decode[0]
        await busy.wait_until(lambda: busy.num_chunks == 1)
        await cluster.until_settled()
        _, view = await cluster.get("/cluster")
        script.release.set()
        await request
    assert (view["router"]["in_flight"], view["router"]["draining"], view["router"]["ready"]) == (1, False, True)
    assert [(w["id"], w["role"], w["state"], w["running"]) for w in view["workers"]] == [
        ("prefill-0", "prefill", "healthy", 0),
        ("decode-0", "decode", "healthy", 1),
        ("decode-1", "decode", "healthy", 0),
    ]
    first = view["workers"][0]
    assert (first["pid"], first["kv_blocks_used"], first["kv_blocks_total"]) == (4242, 3, 64)
    assert (first["weight_version"], first["exact"], first["refused"]) == ("7", True, None)
    assert (first["numerics"], first["kernels"]) == ("device=fake kernels=example probe=0", "example")


async def test_a_worker_that_names_no_kernels_shows_none() -> None:
    async with running(Script(description(numerics="this process"))) as cluster:
        _, view = await cluster.get("/cluster")
    assert [worker["kernels"] for worker in view["workers"]] == [None, None]


EXPOSITION = """\
# HELP moerelay_kv_blocks_used Blocks in use.
# TYPE moerelay_kv_blocks_used gauge
moerelay_kv_blocks_used{role="decode",worker="own-name"} 3.0
# HELP moerelay_handoff_bytes_total Bytes.
# TYPE moerelay_handoff_bytes_total counter
moerelay_handoff_bytes_total 12.0
"""


async def test_metrics_are_merged_by_name() -> None:
    async with running(Script(exposition=EXPOSITION)) as cluster:
        await cluster.canary()
        await cluster.post({})
        async with cluster.http.get("/metrics") as response:
            text = await response.text()
    assert text.count("# TYPE moerelay_handoff_bytes_total counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    # A sample that names its worker keeps its labels; one that does not gets them from the router.
    assert {s.labels["worker"] for s in families["moerelay_kv_blocks_used"].samples} == {"own-name"}
    handoff = families["moerelay_handoff_bytes"].samples
    assert [(s.labels, s.value) for s in handoff] == [
        ({"worker": "prefill-0", "role": "prefill"}, 12),
        ({"worker": "decode-0", "role": "decode"}, 12),
    ]
    assert [s.value for s in families["moerelay_router_in_flight"].samples] == [0]
    outcomes = {
        s.labels["outcome"]: s.value
        for s in families["moerelay_router_requests"].samples
        if s.name == "moerelay_router_requests_total" and s.labels["endpoint"] == "generate"
    }
    assert outcomes == {"finished": 1, "error": 1, "aborted": 0, "client_left": 0}
    errors = {s.labels.get("type"): s.value for s in families["moerelay_router_errors"].samples if "_total" in s.name}
    assert errors.pop("BadRequestError") == 1
    assert set(errors.values()) == {0}  # all there are, so that the first one of a kind is an increase
    unlabelled = [s for family in families.values() for s in family.samples if not s.labels]
    counts = {s.name: s.value for s in unlabelled if s.name.endswith("_seconds_count")}
    assert counts == {
        "moerelay_time_to_first_token_seconds_count": 1,
        "moerelay_inter_token_latency_seconds_count": 3,
        "moerelay_request_time_per_output_token_seconds_count": 1,
        # The request that was refused is not in it.
        "moerelay_e2e_request_latency_seconds_count": 1,
        "moerelay_prefill_seconds_count": 1,
        "moerelay_handoff_tail_seconds_count": 1,
    }
    assert [s.value for s in families["moerelay_failovers"].samples] == [0]
    assert "_created" not in text


async def test_every_token_counts_in_the_inter_token_latency() -> None:
    async with running(Script(chunk_tokens=3)) as cluster:
        await cluster.generate([5, 6, 7], max_tokens=8)
        async with cluster.http.get("/metrics") as response:
            text = await response.text()
    # Chunks of 3, 3 and 2: the tokens that come with the first one have no time between them.
    assert "moerelay_inter_token_latency_seconds_count 5.0" in text
    assert "moerelay_time_to_first_token_seconds_count 1.0" in text


def write_generation_config(folder: Path, text: str) -> RouterSettings:
    (folder / "generation_config.json").write_text(text)
    return RouterSettings(model=str(folder))


async def test_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    text = '{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": null, "do_sample": true, "max_new_tokens": 16}'
    write_generation_config(tmp_path, text)
    async with running(model=str(tmp_path)) as cluster:
        answer = await cluster.generate([5, 6, 7], ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 125
        await cluster.generate([5, 6, 7], max_tokens=1, temperature=0, top_k=-1, top_p=1)
        default, explicit = (request.sampling for request in cluster.decode[0].decode_requests)
    assert (default.temperature, default.top_p, default.top_k, default.min_p) == (0.6, 0.95, 20, 0)
    assert (explicit.temperature, explicit.top_p, explicit.top_k) == (0, 1, 0)
    async with running(model=str(tmp_path), ignore_generation_config=True) as cluster:
        await cluster.generate([5, 6, 7], max_tokens=1)
        assert cluster.decode[0].decode_requests[0].sampling.temperature == 1


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"temperature": -1}',
        '{"repetition_penalty": 0}',
        '{"top_p": "x"}',
        pytest.param('{"a":' * 100_000 + "1" + "}" * 100_000, id="deep"),
    ],
)
def test_generation_configs_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--ignore-generation-config"):
        create_app(write_generation_config(tmp_path, text))


def test_model_must_be_a_directory(tmp_path: Path) -> None:
    for model in (str(tmp_path / "missing"), "org/some-model"):
        for ignore in (False, True):
            with pytest.raises(ConfigError, match=f"--model {model} is not a directory on this machine"):
                create_app(RouterSettings(model=model, ignore_generation_config=ignore))
    create_app(RouterSettings(model=str(tmp_path)))


def test_model_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-moe").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert create_app(RouterSettings(model="~/tiny-moe"))[MODEL].name == "tiny-moe"


async def test_a_body_that_is_not_encoded_as_it_says() -> None:
    """Spoken by hand: aiohttp's own client would drop the answer, if the connection ends right behind it."""
    async with running() as cluster:
        host, port = cluster.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx"
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 400 ")
        error = strict_json(body.decode())["error"]
        assert error["param"] == "Content-Encoding"
        assert "gzip" in error["message"]
        await cluster.canary()


async def test_mistakes_of_clients_of_other_endpoints_get_the_fix() -> None:
    async with running() as cluster:
        for body, param, word in (
            ({"prompt": "Hello", "max_tokens": 5}, "token_ids", "token ids, not text"),
            ({"token_ids": [5], "max_tokens": 5}, "sampling_params", "max_tokens"),
            ({"token_ids": [5], "sampling_params": []}, "sampling_params", "object"),
        ):
            status, answer = await cluster.post(body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert word in answer["error"]["message"]
