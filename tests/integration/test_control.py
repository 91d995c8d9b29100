"""Pause, weight updates and sleep under live requests, on real checkpoints.

What was frozen goes on as if nothing had been, an aborted answer is whole as far as it goes, and each answer names the
weights that its tokens came from.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.engine.solo import SoloRunner
from common.sampling import SamplingParams
from tests.e2e.cluster import Answer, JsonObject, request_body, until
from tests.e2e.oracle import assert_equals_solo
from tests.integration.held_runner import HeldRunner, held
from tests.integration.kit import Kit, checkpoint_kit
from tests.integration.relay import ADMIN_KEY, Relay, WorkerEnd, WorkerPlan, running_relay
from tests.integration.test_exact import MODES, prompt_of

MakeCheckpoint = Callable[..., Path]

PROMPT = prompt_of(20)
LONG: JsonObject = {"max_tokens": 80, "ignore_eos": True, "logprobs": 1}


def plans(kit: Kit, mode: str, **changes: Any) -> tuple[WorkerPlan, WorkerPlan | None]:
    plan = WorkerPlan(kit, **changes)
    return plan, plan if mode == "disaggregated" else None


async def call(relay: Relay, path: str, body: JsonObject | None = None) -> tuple[int, JsonObject]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with relay.client.session.post(relay.client.url + path, json=body, headers=headers) as response:
        answer: JsonObject = await response.json()
        return response.status, answer


async def done(relay: Relay, path: str, body: JsonObject | None = None) -> JsonObject:
    status, answer = await call(relay, path, body)
    assert status == 200, answer
    return answer


def runner_of(end: WorkerEnd) -> HeldRunner:
    assert isinstance(end.runner, HeldRunner)
    return end.runner


async def hold(end: WorkerEnd, num_steps: int) -> None:
    """Returns when the worker has computed so many more steps, and the next one stands still."""
    runner = runner_of(end)
    runner.hold_after(runner.num_steps + num_steps)
    await asyncio.to_thread(runner.wait_held)


async def in_mid_step(relay: Relay, end: WorkerEnd, operation: "asyncio.Task[JsonObject]") -> None:
    """Lets the held step end once a worker pauses: this one, or one that waits for what this one computes."""

    async def pausing() -> bool:
        return any(view["pause"] == "pausing" for view in (await relay.client.json("/cluster"))["workers"])

    await until(pausing)
    runner_of(end).hold_after(None)
    await operation


async def raw(relay: Relay, prompt: list[int], **fields: Any) -> JsonObject:
    """The only choice of a whole answer, as it came."""
    async with relay.client.session.post(
        f"{relay.client.url}/inference/v1/generate", json=request_body(prompt, **fields)
    ) as response:
        assert response.status == 200, await response.text()
        choice: JsonObject = (await response.json())["choices"][0]
        return choice


def as_answer(choice: JsonObject) -> Answer:
    answer = Answer(200)
    answer.take(choice)
    return answer


def solo_tokens(solo: SoloRunner, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [token.token_id for token in solo.run(prompt, params, None).tokens]


def assert_whole(choice: JsonObject, prompt: list[int], versions: set[str]) -> None:
    """Tokens, rows and versions of one answer have equal spans, whatever ended it."""
    answer = as_answer(choice)
    spans = choice["weight_versions"]
    assert {span["version"] for span in spans} <= versions
    assert len({span["version"] for span in spans}) == len(spans)
    edges = [0, *(span["end"] for span in spans)]
    assert [span["start"] for span in spans] == edges[:-1]
    assert edges[-1] == len(answer.token_ids)
    if answer.token_ids:
        assert len(answer.rows) == len(prompt) + len(answer.token_ids) - 1
        assert (answer.rows[..., 0] != answer.rows[..., 1]).all()


# --- pause


@pytest.mark.parametrize("mode", MODES)
async def test_frozen_in_mid_decode(make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str) -> None:
    kit = held(checkpoint_kit(make_checkpoint()))
    async with running_relay(*plans(kit, mode), **admin) as relay:
        request = asyncio.create_task(relay.client.generate(PROMPT, stream=True, **LONG))
        await hold(relay.decode, 10)
        await in_mid_step(relay, relay.decode, asyncio.create_task(done(relay, "/pause?mode=keep")))
        steps = runner_of(relay.decode).num_steps
        refused = await relay.client.generate(PROMPT, max_tokens=1)
        assert refused.status == 503
        assert await relay.decode.violations() == []
        assert not request.done()
        assert runner_of(relay.decode).num_steps == steps
        await done(relay, "/resume")
        assert_equals_solo(await request, kit.solo(), PROMPT, **LONG)
        await relay.assert_baseline()


async def test_a_prompt_under_way_comes_to_its_first_token_and_is_frozen_then(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any]
) -> None:
    """Its KV never comes from two sets of weights; and it stays frozen for longer than a handoff may stand still."""
    kit, prompt = held(checkpoint_kit(make_checkpoint())), prompt_of(100)
    fields: JsonObject = {"max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    async with running_relay(*plans(kit, "disaggregated", timeout_s=1.0), **admin) as relay:
        request = asyncio.create_task(relay.client.generate(prompt, **fields))
        await hold(relay.prefiller, 3)
        await in_mid_step(relay, relay.prefiller, asyncio.create_task(done(relay, "/pause?mode=keep")))
        await asyncio.sleep(2.0)  # not to wait for anything: this is how long the operator keeps it paused
        assert not request.done()
        assert runner_of(relay.prefiller).num_steps == 7
        assert relay.decode.core.engine.stats.generated_tokens < 3
        await done(relay, "/resume")
        assert_equals_solo(await request, kit.solo(), prompt, **fields)
        await relay.assert_baseline()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["abort", "keep"])
async def test_abort_keeps_what_there_is(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str, first: str
) -> None:
    """Also when the request was frozen before."""
    kit = held(checkpoint_kit(make_checkpoint()))
    async with running_relay(*plans(kit, mode), **admin) as relay:
        request = asyncio.create_task(relay.client.generate(PROMPT, stream=True, **LONG))
        await hold(relay.decode, 10)
        await in_mid_step(relay, relay.decode, asyncio.create_task(done(relay, f"/pause?mode={first}")))
        if first == "keep":
            await done(relay, "/pause?mode=abort")
        answer = await request
        assert answer.finish_reason == "abort"
        assert 5 < len(answer.token_ids) < 80
        assert answer.token_ids == solo_tokens(kit.solo(), PROMPT, len(answer.token_ids))
        assert len(answer.rows) == len(PROMPT) + len(answer.token_ids) - 1
        assert len(answer.logprobs) == len(answer.token_ids)
        await relay.assert_baseline()
        await done(relay, "/resume")
        assert_equals_solo(await relay.client.generate(PROMPT, **LONG), kit.solo(), PROMPT, **LONG)


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_in_mid_prefill(make_checkpoint: MakeCheckpoint, admin: dict[str, Any], stream: bool) -> None:
    """The prefill worker hears of it from the decode worker, and its report does not become the answer."""
    kit = held(checkpoint_kit(make_checkpoint()))
    async with running_relay(*plans(kit, "disaggregated"), **admin) as relay:
        requests = [
            asyncio.create_task(relay.client.generate(prompt_of(100, seed), stream=stream, **LONG)) for seed in range(4)
        ]
        await hold(relay.prefiller, 3)
        await in_mid_step(relay, relay.prefiller, asyncio.create_task(done(relay, "/pause?mode=abort")))
        for request in requests:
            answer = await request
            assert (answer.error, answer.finish_reason, answer.token_ids) == (None, "abort", [])
        await relay.assert_baseline()
        await done(relay, "/resume")
        assert_equals_solo(await relay.client.generate(PROMPT, **LONG), kit.solo(), PROMPT, **LONG)


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_leaves_frees_what_was_frozen(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str
) -> None:
    kit = held(checkpoint_kit(make_checkpoint()))
    async with running_relay(*plans(kit, mode), **admin) as relay:
        request = asyncio.create_task(relay.client.generate(PROMPT, stream=True, **LONG))
        await hold(relay.decode, 10)
        await in_mid_step(relay, relay.decode, asyncio.create_task(done(relay, "/pause?mode=keep")))
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await relay.assert_baseline()
        assert relay.decode.core.engine.frozen


@pytest.mark.parametrize("mode", MODES)
async def test_wait_finishes_what_was_begun(make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str) -> None:
    kit = held(checkpoint_kit(make_checkpoint()))
    async with running_relay(*plans(kit, mode), **admin) as relay:
        request = asyncio.create_task(relay.client.generate(PROMPT, **LONG))
        await hold(relay.decode, 10)
        await in_mid_step(relay, relay.decode, asyncio.create_task(done(relay, "/pause?mode=wait")))
        assert_equals_solo(await request, kit.solo(), PROMPT, **LONG)
        assert (await relay.client.generate(PROMPT, max_tokens=1)).status == 503


# --- weights


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_name_the_weights_that_they_came_from(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str
) -> None:
    old, new = held(checkpoint_kit(make_checkpoint())), checkpoint_kit(make_checkpoint(seed=8))
    async with running_relay(*plans(old, mode), **admin) as relay:
        request = asyncio.create_task(raw(relay, PROMPT, **LONG))
        await hold(relay.decode, 10)
        update = asyncio.create_task(done(relay, "/update_weights", {"path": str(new.path)}))
        await in_mid_step(relay, relay.decode, update)
        assert update.result() == {"version": "1", "fingerprint": new.fingerprint, "num_paused_requests": 1}
        choice = await request
        assert [span["version"] for span in choice["weight_versions"]] == ["0", "1"]
        assert_whole(choice, PROMPT, {"0", "1"})
        assert len(choice["token_ids"]) == 80
        first = choice["weight_versions"][0]["end"]
        assert choice["token_ids"][:first] == solo_tokens(old.solo(), PROMPT, first)
        assert choice["token_ids"] != solo_tokens(old.solo(), PROMPT, 80)
        later = await raw(relay, PROMPT, **LONG)
        assert later["weight_versions"] == [{"version": "1", "start": 0, "end": 80}]
        assert_equals_solo(as_answer(later), new.solo(), PROMPT, **LONG)
        await relay.assert_baseline()


async def test_an_update_in_mid_prefill(make_checkpoint: MakeCheckpoint, admin: dict[str, Any]) -> None:
    """The prompt is finished with the old weights; the handshake before the update stays good."""
    old, new = held(checkpoint_kit(make_checkpoint())), checkpoint_kit(make_checkpoint(seed=8))
    prompt = prompt_of(100)
    async with running_relay(*plans(old, "disaggregated"), **admin) as relay:
        request = asyncio.create_task(raw(relay, prompt, max_tokens=10, ignore_eos=True))
        await hold(relay.prefiller, 3)
        update = asyncio.create_task(done(relay, "/update_weights", {"path": str(new.path), "version": "b"}))
        await in_mid_step(relay, relay.prefiller, update)
        choice = await request
        assert_whole(choice, prompt, {"0", "b"})
        spans = choice["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "b"]
        assert choice["token_ids"][: spans[0]["end"]] == solo_tokens(old.solo(), prompt, spans[0]["end"])
        later = await raw(relay, prompt, max_tokens=10, ignore_eos=True)
        assert_equals_solo(as_answer(later), new.solo(), prompt, max_tokens=10, ignore_eos=True)
        await relay.assert_baseline()


@pytest.mark.parametrize("pause", ["abort", "wait", "keep"])
async def test_an_update_under_fifty_streams(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], pause: str
) -> None:
    """Every answer is consistent, and begins with what the version that it names first would have said."""
    old, new = checkpoint_kit(make_checkpoint()), checkpoint_kit(make_checkpoint(seed=8))
    prompts = [prompt_of(5 + i, seed=i) for i in range(50)]
    fields: JsonObject = {"max_tokens": 30, "ignore_eos": True}
    async with running_relay(*plans(old, "disaggregated", num_blocks=300), **admin) as relay:
        requests = [asyncio.create_task(raw(relay, prompt, **fields)) for prompt in prompts]
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)

        async def under_way() -> bool:
            """Both workers have let all of them in, so that none is refused when they pause."""
            return relay.prefiller.core.engine.stats.prompt_tokens_computed == num_prompt_tokens

        await until(under_way)
        await done(relay, "/update_weights", {"path": str(new.path), "mode": pause})
        choices = await asyncio.gather(*requests)
        later = await relay.client.generate(prompts[0], **fields)
        await relay.assert_baseline()
    assert_equals_solo(later, new.solo(), prompts[0], **fields)
    solos = {"0": old.solo(), "1": new.solo()}
    for index, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        assert_whole(choice, prompt, {"0", "1"} if pause == "keep" else {"0"})
        if pause != "abort":
            assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 30)
        if choice["weight_versions"] and index % 5 == 0:
            first = choice["weight_versions"][0]
            assert choice["token_ids"][: first["end"]] == solo_tokens(solos[first["version"]], prompt, first["end"])


@pytest.mark.parametrize("damage", ["another shape", "a broken file", "no config", "no tensors"])
async def test_a_checkpoint_that_cannot_be_used_changes_nothing(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], damage: str, tmp_path: Path
) -> None:
    kit, path = checkpoint_kit(make_checkpoint()), tmp_path / "model"
    shutil.copytree(make_checkpoint(seed=8) if damage != "another shape" else make_checkpoint(num_experts=16), path)
    match damage:
        case "a broken file":
            whole = (path / "model.safetensors").read_bytes()
            (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        case "no config":
            (path / "config.json").unlink()
        case "no tensors":
            (path / "model.safetensors").unlink()
    words = {"another shape": "num_experts is 16, and 8", "no config": "config.json does not exist"}
    async with running_relay(*plans(kit, "disaggregated"), **admin) as relay:
        status, answer = await call(relay, "/update_weights", {"path": str(path)})
        assert (status, answer["error"]["param"]) == (400, "path")
        assert words.get(damage, "safetensors") in answer["error"]["message"]
        assert_equals_solo(await relay.client.generate(PROMPT, **LONG), kit.solo(), PROMPT, **LONG)
        views = (await relay.client.json("/cluster"))["workers"]
        assert {(view["weight_version"], view["pause"]) for view in views} == {("0", "running")}
        await relay.assert_baseline()


# --- sleep


@pytest.mark.parametrize("level", [1, 2])
async def test_answers_after_sleep_are_those_from_before(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], level: int
) -> None:
    kit = checkpoint_kit(make_checkpoint())
    async with running_relay(*plans(kit, "disaggregated"), **admin) as relay:
        await relay.client.generate(PROMPT, **LONG)
        await done(relay, f"/sleep?level={level}")
        assert relay.decode.core.store.kv_LCSGD.numel() == 0
        assert (await relay.client.generate(PROMPT, **LONG)).status == 503
        assert (await call(relay, "/resume"))[0] == 409
        await done(relay, "/wake_up")
        assert_equals_solo(await relay.client.generate(PROMPT, **LONG), kit.solo(), PROMPT, **LONG)
        await relay.assert_baseline()


async def test_weights_can_be_replaced_in_sleep(make_checkpoint: MakeCheckpoint, admin: dict[str, Any]) -> None:
    old, new = checkpoint_kit(make_checkpoint()), checkpoint_kit(make_checkpoint(seed=8))
    async with running_relay(*plans(old, "disaggregated"), **admin) as relay:
        await done(relay, "/sleep?level=2")
        await done(relay, "/update_weights", {"path": str(new.path)})
        await done(relay, "/wake_up")
        assert_equals_solo(await relay.client.generate(PROMPT, **LONG), new.solo(), PROMPT, **LONG)


async def test_a_frozen_request_keeps_a_worker_awake(make_checkpoint: MakeCheckpoint, admin: dict[str, Any]) -> None:
    kit = held(checkpoint_kit(make_checkpoint()))
    async with running_relay(*plans(kit, "aggregated"), **admin) as relay:
        request = asyncio.create_task(relay.client.generate(PROMPT, **LONG))
        await hold(relay.decode, 10)
        await in_mid_step(relay, relay.decode, asyncio.create_task(done(relay, "/pause?mode=keep")))
        status, answer = await call(relay, "/sleep?level=1&mode=keep")
        assert (status, "1 requests are live" in answer["error"]["message"]) == (409, True)
        await done(relay, "/resume")
        assert_equals_solo(await request, kit.solo(), PROMPT, **LONG)


async def test_metrics_tell_what_happened(make_checkpoint: MakeCheckpoint, admin: dict[str, Any]) -> None:
    kit = checkpoint_kit(make_checkpoint())
    async with running_relay(*plans(kit, "disaggregated"), **admin) as relay:
        await done(relay, "/update_weights", {"path": str(make_checkpoint(seed=8))})
        await done(relay, "/pause")
        assert await relay.client.metric("moerelay_weight_updates_total") == 2
        assert await relay.client.metric("moerelay_pause_state") == 4
        assert await relay.client.metric("moerelay_sleep_level") == 0
