"""What answers are made of on their way out: structs that are encoded without being validated again.

Each stands for the model of the same name in `response_schemas`, which says what clients may expect, and has its fields
in the same order. What is in them was made by the router itself, once per event of every stream.
"""

import secrets
import threading

import msgspec

#: By vocabulary id, as a decimal string; None at position 0.
PromptLogprobEntry = dict[str, "PromptLogprob"] | None


class Form(msgspec.Struct, frozen=True, gc=False):
    """Base of everything that is encoded: short-lived, and never part of a cycle."""


class PromptTokensDetails(Form, frozen=True, gc=False):
    cached_tokens: int


class Usage(Form, frozen=True, gc=False):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: None = None


class Logprob(Form, frozen=True, gc=False):
    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(Logprob, frozen=True, gc=False):
    top_logprobs: list[Logprob]


class ChoiceLogprobs(Form, frozen=True, gc=False):
    content: list[TokenLogprobs]


class WeightVersion(Form, frozen=True, gc=False):
    version: str
    start: int
    end: int


class RoutedExperts(Form, frozen=True, gc=False):
    data: "Base64"
    shape: list[int]
    dtype: str
    start: int


class PromptLogprob(Form, frozen=True, gc=False):
    logprob: float
    rank: int
    decoded_token: str | None


class _Choice(Form, frozen=True, gc=False):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: ChoiceLogprobs | None
    routed_experts: "Base64 | RoutedExperts | None"
    sampling_mask: list[list[int]] | None
    weight_versions: list[WeightVersion] | None


class GenerateResponseChoice(_Choice, frozen=True, gc=False):
    pass


class GenerateResponse(Form, frozen=True, gc=False):
    request_id: str
    model: str
    created: int
    usage: Usage
    prompt_logprobs: list[PromptLogprobEntry] | None
    prompt_token_ids: list[int] | None
    choices: list[GenerateResponseChoice]


class GenerateResponseStreamChoice(_Choice, frozen=True, gc=False):
    pass


class GenerateStreamResponse(Form, frozen=True, gc=False):
    request_id: str
    usage: Usage | None
    prompt_token_ids: list[int] | None
    choices: list[GenerateResponseStreamChoice]


#: JSON as it is written to a client: not joined, because some of it may be large.
Json = tuple[bytes, ...]

#: From here on a text is not copied into the JSON around it: that would stop every other thread for as long.
LARGE_TEXT_BYTES = 512 * 1024

#: Stands for a large text while the JSON around it is encoded; nobody can guess it, so that no text contains it.
_MARK = secrets.token_hex(16)
_MARK_BYTES = _MARK.encode()


class LargeText:
    """Text without anything that JSON escapes, as base64."""

    def __init__(self, text: bytes) -> None:
        self.text = text


#: What base64 is in an answer.
Base64 = str | LargeText


class _Parked(threading.local):
    """Large texts of the answer that this thread is encoding."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []


_parked = _Parked()


def _park(found: object) -> str:
    """What the encoder writes for a LargeText."""
    if not isinstance(found, LargeText):
        raise TypeError(f"{type(found).__name__} has no JSON form")
    _parked.texts.append(found.text)
    return f"{_MARK}{len(_parked.texts) - 1}{_MARK}"


_ENCODER = msgspec.json.Encoder(enc_hook=_park)


def to_json(answer: Form | list[Form]) -> Json:
    """Compact JSON in UTF-8, fields in their order."""
    try:
        encoded = _ENCODER.encode(answer)
    except BaseException:
        _parked.texts.clear()
        raise
    if _MARK_BYTES not in encoded:
        return (encoded,)
    texts, _parked.texts = _parked.texts, []
    parts = encoded.split(_MARK_BYTES)
    parts[1::2] = [texts[int(number)] for number in parts[1::2]]
    return tuple(parts)
