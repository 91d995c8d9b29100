"""`moerelay verify` against a router whose answers are known, right and wrong."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.engine.solo import SoloResult
from common.errors import InternalError, RoutingMissingError
from deploy.client import ClusterClient
from deploy.verify.case import Case, CaseLimits
from deploy.verify.command import ask_and_judge
from deploy.verify.findings import Difference, Findings
from deploy.verify.judge import Judge, Oracle
from deploy.verify.options import VerifyOptions
from deploy.verify.switches import find_switches
from tests.fakes.arithmetic_model import (
    VOCAB,
    ArithmeticOracle,
    ArithmeticRouter,
    Json,
    Reply,
    Tamper,
    TamperJson,
    fake_vocabulary,
)

VOCABULARY = fake_vocabulary()
LIMITS = CaseLimits(
    VOCAB,
    max_model_len=64,
    max_prompt=40,
    max_output=20,
    eos_token_ids=frozenset({2}),
    pieces=VOCABULARY.pieces,
    grammars=("regex", "choice"),
)
#: Enough for every field to be asked for a few times.
NUM_REQUESTS = 80


class AllFindings(Findings):
    """Keeps every difference, not only the first of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def add(self, request: int, differences: Iterable[Difference]) -> None:
        listed = list(differences)
        self.text += "".join(f"{difference.kind}: {difference.detail}\n" for difference in listed)
        super().add(request, listed)


async def differences(router: ArithmeticRouter) -> str:
    """All that is found, one line each. The router is taken for one with routing."""
    findings = AllFindings()
    await judged(router, routing=True, findings=findings)
    return findings.text


async def judged(
    router: ArithmeticRouter,
    *,
    seed: int = 0,
    concurrency: int = 4,
    oracle: Oracle | None = None,
    routing: bool | None = None,
    with_text: bool = True,
    findings: Findings | None = None,
) -> Judge:
    """`routing`: what to expect; by default what the router says."""
    async with router.running() as url, ClusterClient(url) as client:
        expected = (await find_switches(client)).routing if routing is None else routing
        limits = LIMITS if with_text else dataclasses.replace(LIMITS, pieces=(), grammars=())
        vocabulary = VOCABULARY if with_text else None
        judge = Judge(limits, oracle or ArithmeticOracle(), None, vocabulary, routing=expected)
        judge.findings = findings or judge.findings
        options = VerifyOptions(url, "", requests=NUM_REQUESTS, concurrency=concurrency, seed=seed)
        with ThreadPoolExecutor(1) as executor:
            await ask_and_judge(options, client, judge, executor, advance=lambda _: None)
    return judge


async def test_right_answers_have_no_differences() -> None:
    judge = await judged(ArithmeticRouter(LIMITS.max_model_len))
    assert list(judge.report()) == ["verify: 80 requests, 0 differences"]


async def test_without_a_tokenizer_no_texts_are_asked_for_and_the_report_says_so() -> None:
    assert list((await judged(ArithmeticRouter(LIMITS.max_model_len), with_text=False)).report()) == [
        "the checkpoint has no tokenizer: no stop strings, bad words or structured outputs were asked for",
        "verify: 80 requests, 0 differences",
    ]


async def test_without_routing_answers_have_no_rows_and_the_report_says_so() -> None:
    judge = await judged(ArithmeticRouter(LIMITS.max_model_len, routing=False))
    assert list(judge.report()) == [
        "routing is switched off in the cluster: no rows were compared",
        "verify: 80 requests, 0 differences",
    ]


@pytest.mark.parametrize(("expected", "detail"), [(True, "null instead of uint8"), (False, "instead of null")])
async def test_answers_against_the_switch_are_differences(expected: bool, detail: str) -> None:
    router = ArithmeticRouter(LIMITS.max_model_len, routing=not expected)
    report = (await judged(router, routing=expected)).report()
    assert any(line.startswith("routed_experts: ") and detail in line for line in report)


class BrokenOracle(ArithmeticOracle):
    def answer(self, case: Case) -> Sequence[SoloResult]:
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


def change_last_choice(reply: Reply, streamed: bool) -> Reply:
    """As if every choice but the first were sampled with the first one's random numbers."""
    return dataclasses.replace(reply, token_ids=[i - 31 * reply.choice for i in reply.token_ids])


def widen_mask(reply: Reply, streamed: bool) -> Reply:
    if reply.masks is None:
        return reply
    return dataclasses.replace(reply, masks=[*reply.masks[:-1], [*reply.masks[-1], 5]])


def one_token_beyond_the_stop(reply: Reply, streamed: bool) -> Reply:
    if reply.stop is None:
        return reply
    rows_TLK = np.concatenate([reply.rows_TLK, reply.rows_TLK[-1:]])
    return dataclasses.replace(
        reply,
        token_ids=[*reply.token_ids, 0],
        rows_TLK=rows_TLK,
        logprobs=reply.logprobs and [*reply.logprobs, -1.0],
        masks=reply.masks and [*reply.masks, [0]],
    )


def other_stop(reply: Reply, streamed: bool) -> Reply:
    return dataclasses.replace(reply, stop=reply.stop and reply.stop + "x")


@pytest.mark.parametrize(
    ("tamper", "kind"),
    [
        (flip_expert, "routed_experts"),
        (flip_expert, "conversation"),
        (widen, "routed_experts"),
        (nudge_logprob, "logprobs"),
        (change_token_in_streams, "token_ids"),
        (change_last_choice, "token_ids"),
        (widen_mask, "sampling_mask"),
        (one_token_beyond_the_stop, "token_ids"),
        (other_stop, "stop_reason"),
    ],
)
async def test_every_kind_of_wrong_answer_is_found(tamper: Tamper, kind: str) -> None:
    *lines, summary = (await judged(ArithmeticRouter(LIMITS.max_model_len, tamper))).report()
    [line] = [line for line in lines if line.startswith(f"{kind}: ")]
    assert " first in request " in line
    assert not summary.endswith(" 0 differences")


def of_choices(body: Json, **changes: object) -> Json:
    return {**body, "choices": [{**choice, **changes} for choice in body["choices"]]}


def changed_in(body: Json, field: str, change: Callable[[Any], object]) -> Json:
    """`body` with a field of each choice changed, unless it is null."""
    changed = [{**choice, field: choice[field] and change(choice[field])} for choice in body["choices"]]
    return {**body, "choices": changed}


def usage_of_one_choice(body: Json, streamed: bool) -> Json:
    return {**body, "usage": body["usage"] and {**body["usage"], "completion_tokens": 1}}


def all_of_choice_0(body: Json, streamed: bool) -> Json:
    return of_choices(body, index=0)


def other_version(body: Json, streamed: bool) -> Json:
    return changed_in(body, "weight_versions", lambda spans: [{**spans[0], "version": "8"}])


def short_span(body: Json, streamed: bool) -> Json:
    return changed_in(body, "weight_versions", lambda spans: [{**spans[0], "start": 1}])


def versions_in_every_event(body: Json, streamed: bool) -> Json:
    return of_choices(body, weight_versions=[]) if streamed else body


def drop_last_choice(body: Json, streamed: bool) -> Json:
    return body if streamed else {**body, "choices": body["choices"][:1]}


def end_twice(body: Json, streamed: bool) -> Json:
    return of_choices(body, finish_reason="length") if streamed else body


def never_end(body: Json, streamed: bool) -> Json:
    return of_choices(body, finish_reason=None, weight_versions=None) if streamed else body


def nudge_prompt_logprob(body: Json, streamed: bool) -> Json:
    if not body.get("prompt_logprobs") or len(body["prompt_logprobs"]) < 2:
        return body
    *others, last = body["prompt_logprobs"]
    key, entry = next(iter(last.items()))
    nudged = float(np.nextafter(np.float32(entry["logprob"]), np.float32(1)))
    return {**body, "prompt_logprobs": [*others, {key: {**entry, "logprob": nudged}}]}


def score_the_first_position(body: Json, streamed: bool) -> Json:
    return {**body, "prompt_logprobs": body.get("prompt_logprobs") and [{}, *body["prompt_logprobs"][1:]]}


def other_prompt(body: Json, streamed: bool) -> Json:
    return {**body, "prompt_token_ids": body["prompt_token_ids"] and [0]}


def prompt_again(body: Json, streamed: bool) -> Json:
    return {**body, "prompt_token_ids": [0]} if streamed and not body["choices"] else body


def rows_from_zero(body: Json, streamed: bool) -> Json:
    return changed_in(body, "routed_experts", lambda rows: {**rows, "start": 0} if isinstance(rows, dict) else rows)


def data_last(body: Json, streamed: bool) -> Json:
    return changed_in(
        body, "routed_experts", lambda rows: dict(reversed(rows.items())) if isinstance(rows, dict) else rows
    )


@pytest.mark.parametrize(
    ("tamper", "line"),
    [
        (usage_of_one_choice, "usage: "),
        (all_of_choice_0, "has index 0"),
        (all_of_choice_0, "follows the one with its finish reason"),
        (other_version, "weight_versions: "),
        (short_span, "weight_versions: "),
        (versions_in_every_event, "weight versions belong on the event with the finish reason"),
        (drop_last_choice, "choices: "),
        (end_twice, "follows the one with its finish reason"),
        (never_end, "the stream ended without a finish reason of choice"),
        (nudge_prompt_logprob, "prompt_logprobs: "),
        (score_the_first_position, "prompt_logprobs: "),
        (other_prompt, "prompt_token_ids: "),
        (prompt_again, "prompt_token_ids come after the first event"),
        (rows_from_zero, "routed_experts.start is 0, not "),
        (data_last, "routed_experts has the keys "),
    ],
)
async def test_every_wrong_wording_is_found(tamper: TamperJson, line: str) -> None:
    assert line in await differences(ArithmeticRouter(LIMITS.max_model_len, tamper_json=tamper))


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("n", "choices"),
        ("temperature", "token_ids"),
        ("top_p", "token_ids"),
        ("top_k", "token_ids"),
        ("min_p", "token_ids"),
        ("seed", "token_ids"),
        ("stop_token_ids", "token_ids"),
        ("ignore_eos", "token_ids"),
        ("logit_bias", "token_ids"),
        ("presence_penalty", "token_ids"),
        ("frequency_penalty", "token_ids"),
        ("repetition_penalty", "token_ids"),
        ("allowed_token_ids", "token_ids"),
        ("bad_words", "token_ids"),
        ("structured_outputs", "token_ids"),
        ("stop", "finish_reason"),
        ("min_tokens", "token_ids"),
        ("logprobs", "logprobs"),
        ("prompt_logprobs", "prompt_logprobs"),
        ("return_sampling_mask", "sampling_mask"),
        ("return_routed_experts", "routed_experts"),
        ("routed_experts_prompt_start", "routed_experts"),
        ("routed_experts_format", "failed"),
    ],
)
async def test_a_server_that_ignores_a_field_is_found_out(field: str, kind: str) -> None:
    found = await differences(ArithmeticRouter(LIMITS.max_model_len, deaf_to=field))
    assert any(line.startswith(f"{kind}: ") for line in found.splitlines())


async def test_a_lost_row_breaks_the_stream_rule_too() -> None:
    def lose_row(reply: Reply, streamed: bool) -> Reply:
        return dataclasses.replace(reply, rows_TLK=reply.rows_TLK[:-1])

    kinds = {line.partition(":")[0] for line in (await differences(ArithmeticRouter(64, lose_row))).splitlines()}
    assert kinds == {"routed_experts", "conversation", "stream"}


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


@pytest.mark.parametrize("processed", [True, False])
async def test_the_mode_of_logprobs_is_found_out(processed: bool) -> None:
    """A token that alone is allowed is certain, in the distribution that it is sampled from."""

    def certain(reply: Reply, streamed: bool) -> Reply:
        return dataclasses.replace(reply, logprobs=[0.0]) if processed else reply

    async with ArithmeticRouter(LIMITS.max_model_len, certain).running() as url, ClusterClient(url) as client:
        assert (await find_switches(client)).processed_logprobs is processed


async def test_a_cluster_that_answers_in_another_form_is_an_error() -> None:
    router = ArithmeticRouter(LIMITS.max_model_len, tamper_json=lambda body, streamed: {**body, "choices": []})
    async with router.running() as url, ClusterClient(url) as client:
        with pytest.raises(InternalError, match="not the documented form"):
            await find_switches(client)
