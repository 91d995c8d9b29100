"""Compares an answer of the cluster with the solo runs of the same request, bit for bit."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from common.engine.solo import SoloResult
from common.id_mask import unpack_ids
from common.routing.record import RoutingArray
from deploy.client import Json, join_rows
from deploy.verify.answer import Answer, ChoiceAnswer
from deploy.verify.case import Case, Form
from deploy.verify.expected import weight_versions
from deploy.verify.findings import Difference
from deploy.verify.logprobs import expected, expected_of_prompt, told, told_of_prompt

InT = TypeVar("InT")
OutT = TypeVar("OutT")


def compare(case: Case, answer: Answer, solos: Sequence[SoloResult]) -> Iterator[Difference]:
    """Everything in which the answer is not what it must be; one solo run per choice, rows from `case.rows_from` on."""
    for rule in answer.broken_rules:
        yield Difference("stream" if case.form is not Form.WHOLE else "form", rule)
    yield from _values("choices", len(answer.choices), len(solos))
    for index, (choice, solo) in enumerate(zip(answer.choices, solos, strict=False)):
        where = f"choice {index}: " if len(solos) > 1 else ""
        for difference in _choice(case, choice, solo):
            yield Difference(difference.kind, where + difference.detail)
    scores = solos[0].prompt_logprobs
    expected_scores = None if scores is None else expected_of_prompt(scores)
    yield from _values("prompt_logprobs", _if_any(answer.prompt_logprobs, told_of_prompt), expected_scores)
    prompt = list(case.prompt) if case.wire.return_token_ids else None
    yield from _values("prompt_token_ids", answer.prompt_token_ids, prompt)
    p, g = len(case.prompt), sum(len(solo.tokens) for solo in solos)
    usage = {name: answer.usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    yield from _values("usage", usage, {"prompt_tokens": p, "completion_tokens": g, "total_tokens": p + g})


def _choice(case: Case, choice: ChoiceAnswer, solo: SoloResult) -> Iterator[Difference]:
    yield from _values("token_ids", choice.token_ids, [token.token_id for token in solo.tokens])
    yield from _values("finish_reason", choice.finish_reason, solo.finish.reason.value)
    yield from _values("stop_reason", choice.stop_reason, solo.finish.stop_reason)
    logprobs = None if case.sampling.logprobs is None else expected(solo.tokens)
    yield from _values("logprobs", _if_any(choice.logprobs, told), logprobs)
    masks = [unpack_ids(token.mask) for token in solo.tokens if token.mask is not None]
    yield from _values("sampling_mask", choice.masks, masks or None)
    yield from _values("weight_versions", choice.weight_versions, weight_versions(solo))
    own_TLK = None if solo.rows_TLK is None else solo.rows_TLK[case.routing_start - case.rows_from :]
    yield from _rows("routed_experts", choice.rows_TLK, own_TLK)
    if case.first_turn is not None and choice.rows_TLK is not None:
        stitched_TLK = join_rows([case.first_turn.rows_TLK, choice.rows_TLK])
        yield from _rows("conversation", stitched_TLK, solo.rows_TLK)


def _if_any(value: InT | None, read: Callable[[InT], OutT]) -> OutT | None:
    return None if value is None else read(value)


def _values(kind: str, got: object, expected: object) -> Iterator[Difference]:
    if got == expected:
        return
    if isinstance(got, list) and isinstance(expected, list):
        at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        if at is None:
            yield Difference(kind, f"{len(got)} instead of {len(expected)} entries")
        else:
            yield Difference(kind, f"entry {at} is {got[at]} instead of {expected[at]}")
    else:
        yield Difference(kind, f"{got} instead of {expected}")


def _rows(kind: str, got: RoutingArray | None, expected: RoutingArray | None) -> Iterator[Difference]:
    if got is None or expected is None:
        if got is not expected:
            yield Difference(kind, f"{_describe(got)} instead of {_describe(expected)}")
        return
    if got.dtype != expected.dtype or got.shape != expected.shape:
        yield Difference(kind, f"{_describe(got)} instead of {_describe(expected)}")
    elif got.tobytes() != expected.tobytes():
        row, layer, _ = np.argwhere(got != expected)[0]
        detail = f"row {row}, layer {layer}: {got[row, layer].tolist()} instead of {expected[row, layer].tolist()}"
        yield Difference(kind, detail)


def _describe(rows: RoutingArray | None) -> str:
    return "null" if rows is None else f"{rows.dtype}{list(rows.shape)}"


def fingerprint(case: Case, answer: Answer) -> Json:
    """One line of --dump: digests of everything that two runs with the same seed must have in common."""
    prompt_logprobs = _if_any(answer.prompt_logprobs, told_of_prompt)
    return {
        "request": case.index,
        "prompt_logprobs": _digest(json.dumps(prompt_logprobs).encode()),
        "choices": [_choice_fingerprint(choice) for choice in answer.choices],
    }


def _choice_fingerprint(choice: ChoiceAnswer) -> Json:
    rows = choice.rows_TLK
    return {
        "token_ids": _digest(json.dumps(choice.token_ids).encode()),
        "logprobs": _digest(json.dumps(_if_any(choice.logprobs, told)).encode()),
        "sampling_mask": _digest(json.dumps(choice.masks).encode()),
        "routed_experts": _digest(b"" if rows is None else rows.tobytes()),
        "shape": _describe(rows),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
