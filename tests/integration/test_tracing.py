"""One request is one tree of spans, over router, prefill and decode worker, and nearly all of its time is in it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from common.model.batch import Chunk, StepOutput
from tests.contract.transports import make_transport
from tests.fakes.fake_runner import FakeRunner
from tests.integration.kit import fake_kit
from tests.integration.relay import WorkerPlan, running_relay
from tests.integration.traces import Trace, traces_in

ROUTER, PREFILL, DECODE = (f"moerelay-{name}" for name in ("router", "prefill", "decode"))

#: So long that what happens around the steps is small beside them, on a machine that does other things too.
STEP_S = 0.03
#: Whoever runs beside this may keep a process from running for a moment, which then is in no span.
ATTEMPTS = 5


class SlowRunner(FakeRunner):
    """Takes its time."""

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        time.sleep(STEP_S)
        return super().execute(chunks)


SLOW = replace(fake_kit(), make_runner=SlowRunner)

HANDED_OVER = {
    ("", "llm_request", ROUTER),
    ("llm_request", "router.plan", ROUTER),
    ("llm_request", "router.prompt", ROUTER),
    ("llm_request", "router.stream", ROUTER),
    ("router.prompt", "router.place", ROUTER),
    ("router.prompt", "router.lease", ROUTER),
    ("router.prompt", "prefill", PREFILL),
    ("prefill", "prefill.queue", PREFILL),
    ("prefill", "prefill.compute", PREFILL),
    ("prefill", "handoff.send", PREFILL),
    ("handoff.send", "handoff.receive", DECODE),
    ("router.prompt", "decode", DECODE),
    ("decode", "decode.queue", DECODE),
    ("decode", "decode.take_over", DECODE),
    ("decode", "decode.steps", DECODE),
}


async def trace_of(path: Path, *, aggregated: bool = False, **fields: Any) -> Trace:
    """Of one request to a cluster of its own."""
    endpoint = f"file:{path}"
    plan = WorkerPlan(SLOW, traces=endpoint)
    async with running_relay(plan, None if aggregated else plan, otlp_traces_endpoint=endpoint) as relay:
        assert (await relay.client.generate([*range(4, 45)], ignore_eos=True, **fields)).status == 200
    [trace] = traces_in(path)
    return trace


async def test_a_streamed_request_is_one_tree_that_explains_its_time(tmp_path: Path) -> None:
    shares: list[float] = []
    lacking: list[float] = []
    while not (min(shares, default=1.0) < 0.05 and max(lacking) > 0.5) and len(shares) < ATTEMPTS:
        trace = await trace_of(tmp_path / f"traces-{len(shares)}", stream=True, max_tokens=40)
        assert trace.edges() == HANDED_OVER
        assert trace.root.attributes["gen_ai.usage.prompt_tokens"] == "41"
        assert trace.root.attributes["gen_ai.usage.completion_tokens"] == "40"
        # A tree that lacks a stage is far from it.
        lacking.append(trace.unexplained(without=["router.stream", "decode.steps"]))
        # The stream's span is open from the first token to the last byte: it must not be the only one that explains.
        shares.append(max(trace.unexplained(), trace.unexplained(without=["router.stream"])))
    assert min(shares) < 0.05
    assert max(lacking) > 0.5


async def test_a_request_without_a_handoff(tmp_path: Path) -> None:
    trace = await trace_of(tmp_path / "traces", aggregated=True, max_tokens=3)
    assert {edge for edge in trace.edges() if edge[2] != ROUTER} == {
        ("router.prompt", "decode", DECODE),
        ("decode", "decode.queue", DECODE),
        ("decode", "decode.compute", DECODE),
        ("decode", "decode.steps", DECODE),
    }


async def test_choices_have_their_own_steps(tmp_path: Path) -> None:
    endpoint = f"file:{tmp_path / 'traces'}"
    plan = WorkerPlan(fake_kit(), traces=endpoint)
    async with running_relay(plan, plan, otlp_traces_endpoint=endpoint) as relay:
        await relay.client.generate_n([5, 6, 7], n=3, max_tokens=4, ignore_eos=True)
    [trace] = traces_in(tmp_path / "traces")
    assert [span.name for span in trace.spans].count("decode.steps") == 3


async def test_a_request_that_is_not_traced_leaves_nothing(tmp_path: Path) -> None:
    endpoint = f"file:{tmp_path / 'traces'}"
    plan = WorkerPlan(fake_kit(), traces=endpoint)
    async with running_relay(plan, plan, otlp_traces_endpoint=endpoint, trace_sample_ratio=0.0) as relay:
        assert (await relay.client.generate([5, 6, 7], max_tokens=2)).status == 200
    assert (tmp_path / "traces").read_text() == ""


async def test_a_handoff_over_zmq_carries_the_trace(tmp_path: Path) -> None:
    endpoint = f"file:{tmp_path / 'traces'}"
    plan = WorkerPlan(fake_kit(), traces=endpoint)
    async with running_relay(plan, plan, make_transport("ipc", tmp_path), otlp_traces_endpoint=endpoint) as relay:
        assert (await relay.client.generate([5, 6, 7], max_tokens=4, ignore_eos=True)).status == 200
    [trace] = traces_in(tmp_path / "traces")
    assert trace.edges() == HANDED_OVER


async def test_log_lines_of_all_three_name_the_request_and_its_trace(
    tmp_path: Path,
) -> None:
    endpoint = f"file:{tmp_path / 'traces'}"
    plan = WorkerPlan(fake_kit(), traces=endpoint)
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        async with running_relay(plan, plan, otlp_traces_endpoint=endpoint) as relay:
            await relay.client.generate([5, 6, 7], max_tokens=4, request_id="mine")
    [trace] = traces_in(tmp_path / "traces")
    told = [line for line in lines if line["event"] in ("request_taken", "request_ended")]
    assert {line.get("call", "router") for line in told} == {"router", "decode", "prefill"}
    assert len(told) == 6
    for line in told:
        assert line["request_id"].startswith("mine")
        assert line["trace_id"] == trace.root.trace_id
    assert {line["outcome"] for line in told if line["event"] == "request_ended"} == {"finished"}
