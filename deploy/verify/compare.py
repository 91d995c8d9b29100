"""Compares an answer of the cluster with the solo run of the same request, bit for bit."""

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from common.engine.solo import SoloResult
from common.routing.record import RoutingArray
from common.sampling import SampledToken, TokenLogprob
from deploy.client import Json
from deploy.verify.answer import Answer
from deploy.verify.cases import Case
from deploy.verify.findings import Difference

#: How the API writes a logprob that is not finite.
_NOT_FINITE = -9999.0


def compare(case: Case, answer: Answer, solo: SoloResult) -> Iterator[Difference]:
    """Everything in which the answer is not what it must be."""
    for rule in answer.broken_rules:
        yield Difference("stream", rule)
    expected_ids = [token.token_id for token in solo.tokens]
    yield from _values("token_ids", answer.token_ids, expected_ids)
    yield from _values("finish_reason", answer.finish_reason, solo.finish.reason.value)
    yield from _values("stop_reason", answer.stop_reason, solo.finish.stop_token_id)
    yield from _values("logprobs", _bits(answer.logprobs), _bits(_expected_logprobs(case, solo)))
    yield from _rows(answer.rows_TLK, solo.rows_TLK)
    p, g = len(case.prompt), len(solo.tokens)
    usage = {name: answer.usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    yield from _values("usage", usage, {"prompt_tokens": p, "completion_tokens": g, "total_tokens": p + g})


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


def _rows(got: RoutingArray | None, expected: RoutingArray | None) -> Iterator[Difference]:
    if got is None or expected is None:
        if got is not expected:
            yield Difference("routed_experts", f"{_describe(got)} instead of {_describe(expected)}")
        return
    if got.dtype != expected.dtype or got.shape != expected.shape:
        yield Difference("routed_experts", f"{_describe(got)} instead of {_describe(expected)}")
    elif got.tobytes() != expected.tobytes():
        row, layer, _ = np.argwhere(got != expected)[0]
        yield Difference(
            "routed_experts",
            f"row {row}, layer {layer}: {got[row, layer].tolist()} instead of {expected[row, layer].tolist()}",
        )


def _describe(rows: RoutingArray | None) -> str:
    return "null" if rows is None else f"{rows.dtype}{list(rows.shape)}"


def _expected_logprobs(case: Case, solo: SoloResult) -> list[Json] | None:
    if case.sampling.logprobs is None:
        return None
    return [_expected_entry(token) for token in solo.tokens]


def _expected_entry(token: SampledToken) -> Json:
    assert token.logprob is not None
    alternatives = [token.logprob, *(t for t in token.top if t.token_id != token.token_id)]
    return {**_wire(token.logprob), "top_logprobs": [_wire(t) for t in alternatives]}


def _wire(value: TokenLogprob) -> Json:
    logprob = value.logprob if math.isfinite(value.logprob) else _NOT_FINITE
    return {"token_id": value.token_id, "logprob": logprob, "rank": value.rank}


def _bits(content: list[Json] | None) -> Any:
    """The same entries with each logprob as the hex digits of its float32, so that equal means equal bits."""
    if content is None:
        return None
    return [
        {**entry, "logprob": _hex(entry["logprob"]), "top_logprobs": [
            {**top, "logprob": _hex(top["logprob"])} for top in entry["top_logprobs"]
        ]}
        for entry in content
    ]  # fmt: skip


def _hex(value: float) -> str:
    return np.float32(value).tobytes().hex()


def fingerprint(case: Case, answer: Answer) -> Json:
    """One line of --dump: digests of everything that two runs with the same seed must have in common."""
    rows = answer.rows_TLK
    return {
        "request": case.index,
        "token_ids": _digest(json.dumps(answer.token_ids).encode()),
        "logprobs": _digest(json.dumps(_bits(answer.logprobs)).encode()),
        "routed_experts": _digest(b"" if rows is None else rows.tobytes()),
        "shape": _describe(rows),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
