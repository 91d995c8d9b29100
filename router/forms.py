"""What answers are made of on their way out: structs that are encoded without being validated again.

Each stands for the model of the same name in `response_schemas`, which says what clients may expect, and has its fields
in the same order. What is in them was made by the router itself, once per event of every stream.
"""

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
    data: str
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
    routed_experts: str | RoutedExperts | None
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


_ENCODER = msgspec.json.Encoder()


def to_json(answer: Form | list[Form]) -> bytes:
    """Compact JSON in UTF-8, fields in their order."""
    return _ENCODER.encode(answer)
