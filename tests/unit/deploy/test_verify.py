"""`moerelay verify` against a router whose answers are known, right and wrong."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from common.engine.solo import SoloResult
from common.errors import RoutingMissingError
from deploy.client import ClusterClient
from deploy.verify.cases import Case, CaseLimits
from deploy.verify.command import ask_and_judge, returns_rows
from deploy.verify.judge import Judge, Oracle
from deploy.verify.options import VerifyOptions
from tests.fakes.arithmetic_model import VOCAB, ArithmeticOracle, ArithmeticRouter, Reply, Tamper

LIMITS = CaseLimits(VOCAB, max_model_len=64, max_prompt=60, max_output=20, eos_token_ids=frozenset({2}))
NUM_REQUESTS = 40


async def judged(
    router: ArithmeticRouter,
    *,
    seed: int = 0,
    concurrency: int = 4,
    oracle: Oracle | None = None,
    routing: bool | None = None,
) -> Judge:
    """`routing`: what to expect; by default what the router says."""
    async with router.running() as url, ClusterClient(url) as client:
        expected = await returns_rows(client) if routing is None else routing
        judge = Judge(LIMITS, oracle or ArithmeticOracle(), transformers=None, routing=expected)
        options = VerifyOptions(url, "", requests=NUM_REQUESTS, concurrency=concurrency, seed=seed)
        with ThreadPoolExecutor(1) as executor:
            await ask_and_judge(options, client, judge, executor, advance=lambda: None)
    return judge


async def test_right_answers_have_no_differences() -> None:
    judge = await judged(ArithmeticRouter(LIMITS.max_model_len))
    assert list(judge.report()) == ["verify: 40 requests, 0 differences"]


async def test_without_routing_answers_have_no_rows_and_the_report_says_so() -> None:
    judge = await judged(ArithmeticRouter(LIMITS.max_model_len, routing=False))
    assert list(judge.report()) == [
        "routing is switched off in the cluster: no rows were compared",
        "verify: 40 requests, 0 differences",
    ]


@pytest.mark.parametrize(("expected", "detail"), [(True, "null instead of uint8"), (False, "instead of null")])
async def test_answers_against_the_switch_are_differences(expected: bool, detail: str) -> None:
    router = ArithmeticRouter(LIMITS.max_model_len, routing=not expected)
    report = (await judged(router, routing=expected)).report()
    assert any(line.startswith("routed_experts: 40 differences") and detail in line for line in report)


class BrokenOracle(ArithmeticOracle):
    def answer(self, case: Case) -> SoloResult:
        raise RoutingMissingError("a row was not recorded")


async def test_a_solo_run_that_fails_ends_verify_in_its_own_error() -> None:
    with pytest.raises(RoutingMissingError, match="a row was not recorded"):
        await judged(ArithmeticRouter(LIMITS.max_model_len), oracle=BrokenOracle())


def flip_expert(reply: Reply, streamed: bool) -> Reply:
    rows_TLK = reply.rows_TLK.copy()
    rows_TLK[-1:, 1, 0] ^= 1
    return dataclasses.replace(reply, rows_TLK=rows_TLK)


def widen(reply: Reply, streamed: bool) -> Reply:
    return dataclasses.replace(reply, rows_TLK=reply.rows_TLK.astype(np.uint16))


def nudge_logprob(reply: Reply, streamed: bool) -> Reply:
    if reply.logprobs is None:
        return reply
    nudged = float(np.nextafter(np.float32(reply.logprobs[0]), np.float32(0)))
    return dataclasses.replace(reply, logprobs=[nudged, *reply.logprobs[1:]])


def change_token_in_streams(reply: Reply, streamed: bool) -> Reply:
    if not streamed:
        return reply
    return dataclasses.replace(reply, token_ids=[*reply.token_ids[:-1], reply.token_ids[-1] ^ 1])


@pytest.mark.parametrize(
    ("tamper", "kind"),
    [
        (flip_expert, "routed_experts"),
        (widen, "routed_experts"),
        (nudge_logprob, "logprobs"),
        (change_token_in_streams, "token_ids"),
    ],
)
async def test_every_kind_of_wrong_answer_is_found(tamper: Tamper, kind: str) -> None:
    judge = await judged(ArithmeticRouter(LIMITS.max_model_len, tamper))
    first, *_, summary = judge.report()
    assert f"{kind}: " in "\n".join(judge.report())
    assert " first in request " in first
    assert not summary.endswith(" 0 differences")


async def test_a_lost_row_breaks_the_stream_rule_too() -> None:
    def lose_row(reply: Reply, streamed: bool) -> Reply:
        return dataclasses.replace(reply, rows_TLK=reply.rows_TLK[:-1])

    kinds = {line.partition(":")[0] for line in (await judged(ArithmeticRouter(64, lose_row))).report()}
    assert kinds == {"routed_experts", "stream", "verify"}


async def test_streams_that_break_off_are_failures() -> None:
    router = ArithmeticRouter(LIMITS.max_model_len)
    router.break_after = 0
    [line, _] = (await judged(router)).report()
    assert line.startswith("failed: ")
    assert "WorkerLostError: the stream ended without [DONE]" in line


async def test_dumps_of_equal_runs_are_equal_whatever_the_order(tmp_path: Path) -> None:
    files = []
    for concurrency, seed in ((1, 5), (8, 5), (1, 6)):
        judge = await judged(ArithmeticRouter(LIMITS.max_model_len), seed=seed, concurrency=concurrency)
        files.append(tmp_path / f"{concurrency}-{seed}")
        judge.write_dump(files[-1])
    one, eight, other = (file.read_text() for file in files)
    assert one == eight != other
    assert [json.loads(line)["request"] for line in one.splitlines()] == list(range(NUM_REQUESTS))
