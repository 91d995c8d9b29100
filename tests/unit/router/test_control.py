"""Control routes over fake workers: who is told what, in which order, and what becomes of requests meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.config import RouterSettings
from common.errors import ConflictError, InvalidRequestError, UnavailableError
from common.pb import types_pb2
from tests.fakes.fake_workers import FakeWorker, Script, description, expected_tokens
from tests.unit.router.cluster import (
    GENERATE,
    Cluster,
    choice_events,
    joined_tokens,
    over,
    parse_events,
    router_over,
    running,
)

PROMPT = [5, 6, 7]
KEY = "admin-key"


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, Any]:
    """Settings that serve the control routes."""
    (tmp_path / "keys").write_text(KEY)
    return {"admin_on_public_port": True, "admin_key_file": tmp_path / "keys"}


async def call(cluster: Cluster, path: str, body: Any = None, method: str = "POST") -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with cluster.http.request(method, path, json=body, headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        return response.status, answer


async def done(cluster: Cluster, path: str, body: Any = None) -> dict[str, Any]:
    status, answer = await call(cluster, path, body)
    assert status == 200, answer
    return answer


async def asked(cluster: Cluster, path: str) -> dict[str, Any]:
    status, answer = await call(cluster, path, method="GET")
    assert status == 200, answer
    return answer


def workers(cluster: Cluster) -> list[FakeWorker]:
    return cluster.decode + cluster.prefill


def calls(cluster: Cluster) -> list[list[str]]:
    return [worker.control_calls for worker in workers(cluster)]


@asynccontextmanager
async def held_stream(cluster: Cluster, after: int) -> AsyncIterator["asyncio.Task[list[dict[str, Any]]]"]:
    """A stream of 6 tokens that stands still after the first `after`; its events, once it has ended."""
    decode = cluster.decode[0]
    decode.script.hold_after = after

    async def read() -> list[dict[str, Any]]:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "temperature": 0}}
        return choice_events(parse_events(await cluster.stream(body)))

    stream = asyncio.create_task(read())
    await decode.wait_until(lambda: decode.num_chunks == after)
    yield stream
    decode.script.release.set()
    await stream


# --- pause


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_paused_cluster_takes_no_requests_until_it_is_resumed(admin: dict[str, Any], mode: str) -> None:
    async with running(decode=2, prefill=2, **admin) as cluster:
        assert await done(cluster, f"/pause?mode={mode}") == {"status": "paused"}
        assert await asked(cluster, "/is_paused") == {"is_paused": True}
        async with cluster.http.post(GENERATE, json={"token_ids": PROMPT, "sampling_params": {}}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
            error = (await response.json())["error"]
        assert (error["type"], "paused" in error["message"]) == ("PausedError", True)
        assert (await cluster.get("/ready"))[0] == 503
        assert (await cluster.get("/health"))[0] == 200
        view = (await cluster.get("/cluster"))[1]
        assert [worker["pause"] for worker in view["workers"]] == ["paused"] * 4
        assert view["router"]["ready"] is False
        assert await done(cluster, "/resume") == {"status": "resumed"}
        assert await asked(cluster, "/is_paused") == {"is_paused": False}
        assert (await cluster.get("/ready"))[0] == 200
        await cluster.canary()
        assert calls(cluster) == [[f"pause {mode}", "reset", "resume"]] * 4


async def test_decode_pauses_first_and_resumes_last(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        decode, prefill = cluster.decode[0], cluster.prefill[0]
        decode.control_go.clear()
        pause = asyncio.create_task(done(cluster, "/pause?mode=keep&clear_cache=false"))
        await decode.wait_until(lambda: decode.control_calls == ["pause keep"])
        assert prefill.control_calls == []
        decode.control_go.set()
        await pause
        prefill.control_go.clear()
        resume = asyncio.create_task(done(cluster, "/resume"))
        await prefill.wait_until(lambda: prefill.control_calls == ["pause keep", "resume"])
        assert decode.control_calls == ["pause keep"]
        prefill.control_go.set()
        await resume
        assert decode.control_calls == ["pause keep", "resume"]


async def test_keep_freezes_a_stream_that_goes_on_afterwards(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        async with held_stream(cluster, 2) as stream:
            await done(cluster, "/pause?mode=keep")
            cluster.decode[0].script.release.set()
            assert not stream.done()
            await done(cluster, "/resume")
        assert joined_tokens(stream.result()) == expected_tokens(PROMPT, 6)
        assert stream.result()[-1]["finish_reason"] == "length"


async def test_abort_is_the_default_and_keeps_partial_tokens(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        async with held_stream(cluster, 2) as stream:
            await done(cluster, "/pause")
            events = await stream
        assert joined_tokens(events) == expected_tokens(PROMPT, 2)
        assert events[-1]["finish_reason"] == "abort"
        assert cluster.decode[0].control_calls == ["pause abort", "reset"]


@pytest.mark.parametrize("spelling", ["?mode=wait", "?wait_for_inflight_requests=true"])
async def test_wait_lets_requests_finish(admin: dict[str, Any], spelling: str) -> None:
    async with running(**admin) as cluster, held_stream(cluster, 2) as stream:
        pause = asyncio.create_task(done(cluster, f"/pause{spelling}"))
        await cluster.decode[0].wait_until(lambda: cluster.decode[0].control_calls == ["pause wait"])
        assert (await cluster.post({"token_ids": PROMPT, "sampling_params": {}}))[0] == 503
        cluster.decode[0].script.release.set()
        await pause
        assert joined_tokens(await stream) == expected_tokens(PROMPT, 6)


async def test_a_pause_that_waits_may_be_made_stronger_or_ended(admin: dict[str, Any]) -> None:
    """Neither has to wait for the first pause, which would wait for ever."""
    async with running(**admin) as cluster:
        async with held_stream(cluster, 2) as stream:
            pause = asyncio.create_task(done(cluster, "/pause?mode=wait"))
            await cluster.decode[0].wait_until(lambda: cluster.decode[0].control_calls == ["pause wait"])
            assert (await call(cluster, "/sleep"))[0] == 409
            await done(cluster, "/pause?mode=abort")
            await pause
            assert (await stream)[-1]["finish_reason"] == "abort"
        await done(cluster, "/resume")
        await cluster.canary()


async def test_several_routers_agree(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        addresses: dict[str, Any] = {"decode": [cluster.decode[0].address], "prefill": [cluster.prefill[0].address]}
        # Its heartbeats are rare: its answer comes from the workers, not from what it has heard.
        settings = RouterSettings(**addresses, heartbeat_interval_s=60, **admin)
        async with (
            router_over(settings) as (_, url),
            aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as other,
        ):
            await done(cluster, "/pause?mode=keep")
            assert await (await other.get("/is_paused")).json() == {"is_paused": True}
            assert (await other.post("/resume")).status == 200
        assert await asked(cluster, "/is_paused") == {"is_paused": False}
        await cluster.canary()


async def test_a_worker_that_fails_to_pause_is_named_and_spares_no_other(admin: dict[str, Any]) -> None:
    async with running(decode=2, **admin) as cluster:
        cluster.decode[0].control_errors["pause"] = UnavailableError("no")
        status, answer = await call(cluster, "/pause?mode=keep")
        assert (status, answer["error"]["message"]) == (503, "worker decode-0: no")
        assert cluster.decode[1].control_calls == cluster.prefill[0].control_calls == ["pause keep"]
        await done(cluster, "/resume")
        await cluster.canary()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause?mode=later", None, "mode"),
        ("/pause", {"mode": "later"}, "mode"),
        ("/pause?mode=keep&wait_for_inflight_requests=true", None, "mode"),
        ("/pause?clear_cache=perhaps", None, "clear_cache"),
        ("/sleep?level=3", None, "level"),
        ("/sleep?mode=later", None, "mode"),
        ("/wake_up?tags=weights&tags=teeth", None, "tags"),
        ("/update_weights", {}, "path"),
        ("/update_weights", {"path": "/a", "uri": "file:///a"}, "path"),
        ("/update_weights", {"uri": "s3://bucket/a"}, "uri"),
        ("/update_weights", {"uri": "file://elsewhere/a"}, "uri"),
        ("/update_weights", {"path": "/a", "version": ""}, "version"),
        ("/update_weights", {"path": "/a", "version": 8}, "version"),
        ("/update_weights", {"path": "/a", "mode": "later"}, "mode"),
        ("/pause_generation", {"mode": "keep"}, "mode"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/a", "load_format": "dummy"}, "load_format"),
    ],
)
async def test_wrong_options_reach_no_worker(admin: dict[str, Any], path: str, body: Any, param: str) -> None:
    async with running(**admin) as cluster:
        status, answer = await call(cluster, path, body)
        assert (status, answer["error"]["type"]) == (400, "BadRequestError")
        assert answer["error"]["param"].startswith(param)
        assert calls(cluster) == [[], []]
        await cluster.canary()


async def test_options_come_from_the_body_too(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        await done(cluster, "/pause?mode=wait&clear_cache=false", {"mode": "keep"})
        await done(cluster, "/pause?mode=keep&clear_cache=false", {})
        assert cluster.decode[0].control_calls == ["pause keep", "pause keep"]


async def test_without_workers_it_is_a_503(admin: dict[str, Any]) -> None:
    async with over([], [], **admin) as cluster:
        for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"):
            assert (await call(cluster, path))[0] == 503
        assert (await call(cluster, "/update_weights", {"path": "/a"}))[0] == 503


# --- weights


@pytest.mark.parametrize("body", [{"path": "/new weights"}, {"uri": "file:///new%20weights", "version": "8"}])
async def test_an_update_reaches_every_worker_and_the_next_request(admin: dict[str, Any], body: dict[str, Any]) -> None:
    async with running(decode=2, prefill=2, **admin) as cluster:
        answer = await done(cluster, "/update_weights", body)
        assert answer == {"version": "8", "fingerprint": "weights 8", "num_paused_requests": 0}
        expected = ["stage /new weights 8", "pause keep", "commit 8", "discard", "resume"]
        assert calls(cluster) == [expected] * 4
        info = await asked(cluster, "/weight_info")
        assert (info["version"], info["fingerprint"], info["consistent"]) == ("8", "weights 8", True)
        assert {worker["version"] for worker in info["workers"]} == {"8"}
        assert {worker["weight_version"] for worker in (await cluster.get("/cluster"))[1]["workers"]} == {"8"}
        await cluster.canary()


async def test_live_requests_are_frozen_during_an_update(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        async with held_stream(cluster, 2) as stream:
            answer = await done(cluster, "/update_weights", {"path": "/new"})
            assert answer["num_paused_requests"] == 1
        assert joined_tokens(stream.result()) == expected_tokens(PROMPT, 6)


async def test_an_update_keeps_a_paused_cluster_paused(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        await done(cluster, "/pause?mode=abort&clear_cache=false")
        await done(cluster, "/update_weights", {"path": "/new"})
        assert calls(cluster) == [["pause abort", "stage /new 8", "commit 8", "discard"]] * 2
        assert await asked(cluster, "/is_paused") == {"is_paused": True}


async def test_a_checkpoint_that_one_worker_refuses_changes_nothing(admin: dict[str, Any]) -> None:
    async with running(decode=2, **admin) as cluster:
        cluster.decode[1].control_errors["stage"] = InvalidRequestError("config.json is missing", param="path")
        status, answer = await call(cluster, "/update_weights", {"path": "/new"})
        assert (status, answer["error"]["param"]) == (400, "path")
        assert answer["error"]["message"] == "worker decode-1: config.json is missing; nothing was changed"
        assert calls(cluster) == [["stage /new 8", "discard"]] * 3
        assert {worker.staged_version for worker in workers(cluster)} == {""}
        assert {worker["weight_version"] for worker in (await cluster.get("/cluster"))[1]["workers"]} == {"7"}
        await cluster.canary()


async def test_directories_that_differ_between_machines_are_found_before_the_commit(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        cluster.prefill[0].staged_fingerprint = "other weights"
        status, answer = await call(cluster, "/update_weights", {"path": "/new"})
        assert (status, answer["error"]["param"]) == (400, "path")
        assert "prefill-0: other weights" in answer["error"]["message"]
        assert calls(cluster) == [["stage /new 8", "discard"]] * 2


async def test_a_worker_that_misses_the_commit_is_refused_until_it_is_updated(admin: dict[str, Any]) -> None:
    async with running(decode=2, **admin) as cluster:
        lost = cluster.decode[1]
        lost.control_errors["commit"] = ConflictError("no")
        status, answer = await call(cluster, "/update_weights", {"path": "/new"})
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert "'8' is in use, but not on decode-1: worker decode-1: no" in answer["error"]["message"]
        views = {worker["id"]: worker for worker in (await cluster.get("/cluster"))[1]["workers"]}
        assert "weight_version is '8' on decode-0 and '7' on decode-1" in views["decode-1"]["refused"]
        assert not (await asked(cluster, "/weight_info"))["consistent"]
        for _ in range(3):
            await cluster.canary()
        assert not lost.decode_requests
        lost.control_errors.clear()
        assert (await done(cluster, "/update_weights", {"path": "/new", "version": "8"}))["version"] == "8"
        assert cluster.decode[0].control_calls.count("commit 8") == 1
        assert (await asked(cluster, "/weight_info"))["consistent"]


async def test_a_version_in_use_everywhere_is_refused(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        status, answer = await call(cluster, "/update_weights", {"path": "/new", "version": "7"})
        assert (status, answer["error"]["param"]) == (400, "version")
        assert calls(cluster) == [[], []]


async def test_the_next_version_can_be_guessed_of_numbers_only(admin: dict[str, Any]) -> None:
    script = Script(model=description(weight_version="step-9"))
    async with running(script, **admin) as cluster:
        status, answer = await call(cluster, "/update_weights", {"path": "/new"})
        assert (status, answer["error"]["param"]) == (400, "version")
        assert (await done(cluster, "/update_weights", {"path": "/new", "version": "step-10"}))["version"] == "step-10"


async def test_an_update_ends_well_when_its_client_leaves(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        decode = cluster.decode[0]
        decode.control_go.clear()
        update = asyncio.create_task(done(cluster, "/update_weights", {"path": "/new"}))
        await decode.wait_until(lambda: bool(decode.control_calls))
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)
        decode.control_go.set()
        await decode.wait_until(lambda: decode.control_calls[-1] == "resume")
        await done(cluster, "/resume")  # waits for the update
        assert (await asked(cluster, "/weight_info"))["version"] == "8"
        await cluster.canary()


async def test_updates_come_one_after_the_other(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        both = [done(cluster, "/update_weights", {"path": f"/new-{i}"}) for i in range(2)]
        answers = await asyncio.gather(*both)
        assert sorted(answer["version"] for answer in answers) == ["8", "9"]
        first = cluster.decode[0].control_calls[:5]
        assert [call.split()[0] for call in first] == ["stage", "pause", "commit", "discard", "resume"]


# --- cache and sleep


async def test_cached_blocks_are_counted_on_all_workers(admin: dict[str, Any]) -> None:
    async with running(decode=2, **admin) as cluster:
        assert await done(cluster, "/reset_prefix_cache") == {"status": "reset", "num_blocks": 15}
        assert await done(cluster, "/reset_prefix_cache") == {"status": "reset", "num_blocks": 0}


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_pauses_and_wake_up_serves_again(admin: dict[str, Any], level: int) -> None:
    async with running(**admin) as cluster:
        await done(cluster, f"/sleep?level={level}")
        assert calls(cluster) == [["pause abort", f"sleep {level}"]] * 2
        assert await asked(cluster, "/is_sleeping") == {"is_sleeping": True, "level": level}
        assert [w["sleep_level"] for w in (await cluster.get("/cluster"))[1]["workers"]] == [level, level]
        assert (await cluster.post({"token_ids": PROMPT, "sampling_params": {}}))[0] == 503
        await done(cluster, "/wake_up?tags=weights")
        assert await asked(cluster, "/is_sleeping") == {"is_sleeping": False, "level": 0}
        assert await asked(cluster, "/is_paused") == {"is_paused": True}
        await done(cluster, "/wake_up?tags=weights&tags=kv_cache")
        await cluster.canary()


@pytest.mark.parametrize("path", ["/sleep", "/update_weights_from_disk"])
async def test_abort_ends_what_an_earlier_pause_froze(admin: dict[str, Any], path: str) -> None:
    body = {"model_path": "/new", "abort_all_requests": True} if path != "/sleep" else None
    async with running(**admin) as cluster, held_stream(cluster, 2) as stream:
        await done(cluster, "/pause?mode=keep")
        await done(cluster, path, body)
        assert (await stream)[-1]["finish_reason"] == "abort"
        assert await asked(cluster, "/is_paused") == {"is_paused": True}


async def test_if_one_worker_cannot_sleep_all_are_as_before(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        cluster.prefill[0].control_errors["sleep"] = ConflictError("1 requests are live")
        status, answer = await call(cluster, "/sleep?mode=keep")
        assert (status, answer["error"]["type"]) == (409, "ConflictError")
        assert await asked(cluster, "/is_sleeping") == {"is_sleeping": False, "level": 0}
        await cluster.canary()


# --- SGLang's names


@pytest.mark.parametrize(
    ("mode", "ours"), [(None, "abort"), ("abort", "abort"), ("in_place", "keep"), ("retract", "keep")]
)
async def test_sglang_pauses(admin: dict[str, Any], mode: str | None, ours: str) -> None:
    async with running(**admin) as cluster:
        assert (await done(cluster, "/pause_generation", {"mode": mode} if mode else {}))["status"] == "ok"
        assert (await cluster.get("/ready"))[0] == 503
        assert (await done(cluster, "/continue_generation", {}))["status"] == "ok"
        assert cluster.decode[0].control_calls == [f"pause {ours}", "resume"]
        await cluster.canary()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_sglang_flushes(admin: dict[str, Any], method: str) -> None:
    async with running(**admin) as cluster:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with cluster.http.request(method, "/flush_cache", headers=headers) as response:
            assert (response.status, await response.text()) == (200, "Cache flushed: 10 blocks.\n")


async def test_sglang_updates(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        body = {"model_path": "/new", "weight_version": "rl-1", "abort_all_requests": True, "flush_cache": True}
        answer = await done(cluster, "/update_weights_from_disk", body)
        assert (answer["success"], answer["num_paused_requests"]) == (True, 0)
        assert cluster.decode[0].control_calls == ["stage /new rl-1", "pause abort", "commit rl-1", "discard", "resume"]
        assert await asked(cluster, "/get_weight_version") == {"weight_version": "rl-1"}
        await done(cluster, "/update_weights_from_disk", body | {"weight_version": "rl-2", "keep_pause": True})
        assert await asked(cluster, "/is_paused") == {"is_paused": True}


async def test_sglang_hears_of_failures_in_its_own_way(admin: dict[str, Any]) -> None:
    async with running(**admin) as cluster:
        cluster.prefill[0].control_errors["stage"] = InvalidRequestError("config.json is missing", param="path")
        status, answer = await call(cluster, "/update_weights_from_disk", {"model_path": "/new"})
        assert (status, answer["success"]) == (400, False)
        assert answer["message"] == "worker prefill-0: config.json is missing; nothing was changed"
        await cluster.canary()


# --- who serves meanwhile


async def test_a_running_decode_worker_serves_beside_a_paused_one(admin: dict[str, Any]) -> None:
    script = Script()
    decodes = [FakeWorker(f"decode-{i}", types_pb2.ROLE_BOTH, script) for i in range(2)]
    async with over([], decodes, **admin) as cluster:
        cluster.decode[0].control_errors["resume"] = UnavailableError("no")
        await done(cluster, "/pause?mode=keep")
        assert (await call(cluster, "/resume"))[0] == 503
        for _ in range(3):
            await cluster.canary()
        assert not cluster.decode[0].decode_requests
        assert await asked(cluster, "/is_paused") == {"is_paused": False}
