"""The reader of the load test notices whatever is wrong with a stream, however its bytes arrive."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from deploy.load.contract import BrokenContractError, RowRules
from deploy.load.stream import Arrival, Ask, BrokenStreamError, StreamCheck

ASK = Ask((5, 6, 7), 3)
RULES = RowRules("uint8", 2, 2, 8, (1,))


def rows(count: int, *, dtype: str = "uint8", expert: int = 1, other: int = 2) -> str:
    """So many rows of 2 layers, the first of which has no experts."""
    array = np.zeros((count, 2, 2), dtype)
    array[:, 1] = expert, other
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def event(num_tokens: int, routed: str | None, finish: str | None = None, **changes: Any) -> bytes:
    choice = {"token_ids": [9] * num_tokens, "routed_experts": routed, "finish_reason": finish} | changes
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def usage(num_tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"

#: Two rows of the prompt, then one token and its last row, then two tokens with their rows.
GOOD = [event(0, rows(2)), event(1, rows(1)), event(2, rows(2), "length"), usage(3), DONE]


def read(parts: list[bytes], rules: RowRules | None = RULES) -> list[Arrival]:
    """All parts, a second apart."""
    check = StreamCheck(ASK, rules, 100.0)
    arrivals = [a for second, part in enumerate(parts, start=101) for a in check.feed(part, second)]
    check.finish()
    return arrivals


def test_times_of_tokens() -> None:
    assert read(GOOD) == [Arrival(1, 2.0, True), Arrival(2, 1.0, False)]


def test_bytes_may_arrive_one_by_one() -> None:
    whole = b"".join(GOOD)
    assert [a.num_tokens for a in read([whole[i : i + 1] for i in range(len(whole))])] == [1, 2]


def test_nothing_is_known_of_the_model() -> None:
    assert len(read(GOOD, RowRules())) == 2


def test_without_rows() -> None:
    assert len(read([event(1, None), event(2, None, "length"), usage(3), DONE], None)) == 2
    with pytest.raises(BrokenContractError, match="although routing is switched off"):
        read(GOOD, None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (GOOD[:-1], r"without \[DONE\] after 3 tokens"),
        (GOOD[:2], r"without \[DONE\] after 1 tokens"),
        ([*GOOD[:-1], DONE[:-1]], r"without \[DONE\]"),
        ([], r"without \[DONE\] after 0 tokens"),
        ([event(0, rows(2)), event(1, rows(1)), usage(1), DONE], "without a finish reason"),
        ([b'data: {"error": {"type": "WorkerLostError", "message": "gone"}}\n\n'], "WorkerLostError: gone"),
    ],
)
def test_streams_that_are_not_whole(parts: list[bytes], message: str) -> None:
    with pytest.raises(BrokenStreamError, match=message):
        read(parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([event(1, rows(2))], "2 rows instead of 3 with 1 tokens"),
        ([event(1, rows(4))], "4 rows instead of 3 with 1 tokens"),
        ([event(1, None)], "0 rows instead of 3"),
        ([event(1, rows(3)), event(1, rows(0))], "3 rows instead of 4 with 2 tokens"),
        ([event(0, rows(3, dtype="uint16"))], "rows of uint16 instead of uint8"),
        ([event(0, rows(3, expert=8))], "expert 8 of 8"),
        ([event(0, rows(3, other=1))], "an expert twice in one layer of row 0"),
        ([event(0, "no base64!")], "has not the documented form"),
        ([event(0, "")], "has not the documented form"),
        ([event(0, base64.b64encode(b"\x93NUMPY\x01\x00\x02\x00((").decode())], "has not the documented form"),
        ([b'data: {"choices": [], "usage": [3]}\n\n'], "has not the documented form"),
        ([b"data: \xff\n\n"], "is not UTF-8"),
        ([b"data: {]\n\n"], "has not the documented form"),
        ([b"data: {}\n\n"], "has not the documented form"),
        ([*GOOD, usage(3)], r"an event after \[DONE\]"),
        ([*GOOD[:3], event(0, None)], "an event after the finish reason"),
        ([*GOOD[:2], event(2, rows(2), "stop"), usage(3), DONE], "3 tokens and 'stop' where 3 and 'length'"),
        ([*GOOD[:2], event(1, rows(1), "length"), usage(2), DONE], "2 tokens and 'length' where 3"),
        ([*GOOD[:3], usage(2), DONE], "usage counts 2 of 3"),
        ([*GOOD[:3], DONE], "usage counts None of 3"),
    ],
)
def test_streams_that_break_a_rule(parts: list[bytes], message: str) -> None:
    with pytest.raises(BrokenContractError, match=message):
        read(parts)


def test_shapes_are_those_of_the_model() -> None:
    with pytest.raises(BrokenContractError, match=r"shape \(2, 2\) instead of \(3, 2\)"):
        read([event(0, rows(1))], RowRules(num_layers=3, top_k=2))


def test_an_unknown_model_may_have_layers_of_zeros_and_no_other_repetition() -> None:
    with pytest.raises(BrokenContractError, match="an expert twice"):
        read([event(0, rows(1, other=1))], RowRules())


def test_what_is_asked_for() -> None:
    body = ASK.body()
    assert (body["token_ids"], body["stream"]) == ([5, 6, 7], True)
    assert (body["sampling_params"]["max_tokens"], body["sampling_params"]["ignore_eos"]) == (3, True)
