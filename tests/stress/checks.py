"""Compares what a request was told with its solo run, byte for byte."""

import numpy as np

from common.engine.request import Work
from common.engine.solo import SoloResult
from common.sampling import FinishReason
from tests.stress.asks import Ask
from tests.stress.oracle import Oracle
from tests.unit.engine.rig import Transcript


def check(transcript: Transcript, ask: Ask, oracle: Oracle, *, complete: bool) -> None:
    """Everything told is a prefix of the solo runs, and all of it if the request ended by itself.

    Args:
        complete: nobody cancelled it.

    Raises:
        AssertionError: it is not.
    """
    assert transcript.error is None, f"failed: {transcript.error}"
    if transcript.request.work is Work.PREFILL:
        _check_prefill(transcript, ask, oracle)
        return
    for choice in transcript.all:
        _check_choice(choice, ask, oracle)
        assert choice.finish is not None or not complete, f"choice {choice.choice} never ended"


def _check_prefill(transcript: Transcript, ask: Ask, oracle: Oracle) -> None:
    if not transcript.first_tokens:
        _check_without_tokens(transcript, ask, oracle)
        return
    labels = [transcript.first_tokens[0].weight_version]
    for choice, token in enumerate(transcript.first_tokens):
        expected = oracle.run(ask, transcript.request.routing_start, choice, labels)
        assert token == expected.tokens[0], f"choice {choice} began with {token}, not {expected.tokens[0]}"
    assert len(transcript.first_tokens) == ask.sampling.n
    assert _has_logprobs_of(transcript, oracle.run(ask, None, 0, labels)), "prompt logprobs differ"
    transcript.assert_all_logprobs()


def _check_choice(choice: Transcript, ask: Ask, oracle: Oracle) -> None:
    if not choice.tokens:
        _check_without_tokens(choice, ask, oracle)
        return
    labels = [token.weight_version for token in choice.tokens]
    expected = oracle.run(ask, choice.request.routing_start, choice.choice, labels)
    wanted = expected.tokens[: len(choice.tokens)]
    for at, (got, want) in enumerate(zip(choice.tokens, wanted, strict=True)):
        assert got == want, f"choice {choice.choice}: token {at} of {len(wanted)} is {got}, not {want}"
    assert _has_rows_of(choice, expected), f"choice {choice.choice}: {_difference(choice, expected)}"
    assert _has_logprobs_of(choice, expected), "prompt logprobs differ"
    if choice.finish is not None and choice.finish.reason is not FinishReason.ABORT:
        choice.assert_equals(expected)


def _check_without_tokens(choice: Transcript, ask: Ask, oracle: Oracle) -> None:
    """It was told of its prompt at most, under whatever weights."""
    assert choice.finish is None or choice.finish.reason is FinishReason.ABORT
    if choice.rows or choice.logprobs:
        runs = oracle.runs_of_each(ask, choice.request.routing_start, choice.choice)
        assert any(_has_rows_of(choice, run) and _has_logprobs_of(choice, run) for run in runs), "the prompt differs"


def _has_rows_of(choice: Transcript, expected: SoloResult) -> bool:
    told, want = choice.rows_TLK, expected.rows_TLK
    return told is None or (want is not None and told.tobytes() == want[: len(told)].tobytes())


def _has_logprobs_of(choice: Transcript, expected: SoloResult) -> bool:
    told, want = choice.prompt_logprobs, expected.prompt_logprobs
    return told is None or (want is not None and told.tobytes() == want[: len(told)].tobytes())


def _difference(choice: Transcript, expected: SoloResult) -> str:
    told, want = choice.rows_TLK, expected.rows_TLK
    if told is None or want is None or len(told) > len(want):
        return "there are more rows than there should be"
    at = int(np.flatnonzero((told != want[: len(told)]).any(axis=(1, 2)))[0])
    return f"row {at} of {len(told)} is {told[at].tolist()}, not {want[at].tolist()}"
