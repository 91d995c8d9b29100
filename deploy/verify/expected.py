"""What the API must answer, from solo runs: the rules that the router adds to what an engine generates."""

from collections.abc import Iterator
from dataclasses import replace

from common.engine.solo import SoloResult
from common.sampling import Finish, FinishReason
from deploy.client import Json
from deploy.verify.case import Case
from deploy.verify.findings import Difference
from deploy.verify.grammars import GRAMMARS
from deploy.verify.vocabulary import Vocabulary


def cut_at_stop(case: Case, solo: SoloResult, vocabulary: Vocabulary) -> SoloResult:
    """The run up to the token that completes a stop string; tokens, logprobs and rows keep that token.

    A token that ends the run by itself, by being a stop or an end-of-sequence id, is no part of the text.
    """
    token_ids = [token.token_id for token in solo.tokens]
    if solo.finish.reason is FinishReason.STOP:
        token_ids.pop()
    skip = case.text.skip_special_tokens
    found = vocabulary.stop(token_ids, case.text.stop, case.sampling.min_tokens, skip_special_tokens=skip)
    if found is None:
        return solo
    num_tokens, stop = found
    num_rows = len(case.prompt) - case.rows_from + num_tokens - 1
    return replace(
        solo,
        tokens=solo.tokens[:num_tokens],
        rows_TLK=None if solo.rows_TLK is None else solo.rows_TLK[:num_rows],
        finish=Finish(FinishReason.STOP, stop_string=stop),
    )


def follow_grammar(case: Case, solo: SoloResult, vocabulary: Vocabulary) -> Iterator[Difference]:
    """An output that ended by itself must be one that its grammar describes, which no matcher decides here."""
    if case.text.grammar is None or solo.finish.reason is not FinishReason.STOP:
        return
    text = vocabulary.text([token.token_id for token in solo.tokens[:-1]], skip_special_tokens=False)
    if not GRAMMARS[case.text.grammar].is_complete(text):
        yield Difference("structured_outputs", f"{text!r} is no {case.text.grammar} that was asked for")


def weight_versions(solo: SoloResult) -> list[Json]:
    """One span: the weights do not change while verify runs."""
    [version] = {token.weight_version for token in solo.tokens}
    return [{"version": version, "start": 0, "end": len(solo.tokens)}]
