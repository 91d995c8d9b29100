"""Answers of the OpenAI endpoints; as everywhere, every field is always there."""

from typing import Literal

from pydantic import Field

from common.sampling import FinishReason
from router.response_schemas import PromptLogprobEntry, ResponseModel, RoutedExperts, Usage, WeightVersion


class CompletionLogprobs(ResponseModel):
    """Four lists of equal length, one entry per token; with echo the prompt's tokens come first.

    `text_offset`: where each token begins if the strings in `tokens` are joined. `top_logprobs`: the token itself, then
    the most likely ones; of several tokens that are spelled alike only the first is there.
    """

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="Null for the first token of an echoed prompt.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(ResponseModel):
    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None = Field(
        description="The stop token id, or the stop string, that ended the choice; null for end-of-sequence."
    )
    token_ids: list[int] | None = Field(description="If `return_token_ids` asked for them; never the prompt's.")
    routed_experts: str | RoutedExperts | None = Field(description="As in GenerateResponseChoice.")
    sampling_mask: list[list[int]] | None
    weight_versions: list[WeightVersion] | None


class _CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = Field(description="If `return_token_ids` asked for them.")


class CompletionChoice(_CompletionChoice):
    """One finished choice; those of prompt i have the indices from i * n on."""

    finish_reason: FinishReason
    prompt_logprobs: list[PromptLogprobEntry] | None


class CompletionResponse(ResponseModel):
    """Answer of POST /v1/completions without `stream`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Seconds since the epoch.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: None = None


class CompletionStreamChoice(_CompletionChoice):
    """What one event adds to one choice.

    The last text and the finish reason come in the same event. `prompt_token_ids` are on the first event of the choice,
    an echoed prompt on the one with its first token. Rows are there if `stream_options.routed_experts` asks for them,
    as in GenerateResponseStreamChoice.
    """


class CompletionStreamResponse(ResponseModel):
    """One event of a stream. The usage event, if asked for, has no choices and is the last one before [DONE]."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionStreamChoice]
    usage: Usage | None
    system_fingerprint: None = None


class ChatLogprob(ResponseModel):
    """One token: its text (U+FFFD for what is no whole character), and the bytes it stands for."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprobs(ChatLogprob):
    """One generated token; `top_logprobs` are the most likely ones, whether or not it is among them."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(ResponseModel):
    """One entry per generated token."""

    content: list[ChatTokenLogprobs]
    refusal: None = None


class AssistantMessage(ResponseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Choice):
    """One finished choice."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletionResponse(ResponseModel):
    """Answer of POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Seconds since the epoch.")
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_logprobs: list[PromptLogprobEntry] | None
    prompt_token_ids: list[int] | None = Field(description="If `return_token_ids` asked for them.")


class Delta(ResponseModel):
    """What an event adds to a message."""

    content: str


class FirstDelta(Delta):
    """The first event of a choice names the role; it has no content but an echoed message."""

    role: Literal["assistant"] = "assistant"


class ChatStreamChoice(_Choice):
    """What one event adds to one choice.

    The stream begins with one event per choice that names the role and nothing else. The last text and the finish
    reason come in the same event. Rows are there if `stream_options.routed_experts` asks for them, as in
    GenerateResponseStreamChoice.
    """

    delta: FirstDelta | Delta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(ResponseModel):
    """One event of a stream. The usage event, if asked for, has no choices and is the last one before [DONE]."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: Usage | None
    system_fingerprint: None = None
    prompt_token_ids: list[int] | None = Field(description="On the first event, if `return_token_ids` asked for them.")


class TokenizeResponse(ResponseModel):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int | None = Field(description="Context in tokens; null until a worker has answered.")
    tokens: list[int]
    token_strs: list[str] | None = Field(description="If `return_token_strs` asked for them.")


class DetokenizeResponse(ResponseModel):
    """Answer of POST /detokenize."""

    prompt: str
