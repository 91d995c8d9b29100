"""The structs of the OpenAI endpoints' answers, as `router.forms`; `responses` has the models of the same names."""

from router.forms import Base64, Form, PromptLogprobEntry, RoutedExperts, Usage, WeightVersion


class CompletionLogprobs(Form, frozen=True, gc=False):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(Form, frozen=True, gc=False):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: Base64 | RoutedExperts | None
    sampling_mask: list[list[int]] | None
    weight_versions: list[WeightVersion] | None


class _CompletionChoice(_Choice, frozen=True, gc=False):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None


class CompletionChoice(_CompletionChoice, frozen=True, gc=False):
    prompt_logprobs: list[PromptLogprobEntry] | None


class CompletionStreamChoice(_CompletionChoice, frozen=True, gc=False):
    pass


class CompletionResponse(Form, frozen=True, gc=False, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: None = None


class CompletionStreamResponse(Form, frozen=True, gc=False, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionStreamChoice]
    usage: Usage | None
    system_fingerprint: None = None


class ChatLogprob(Form, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprobs(ChatLogprob, frozen=True, gc=False):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(Form, frozen=True, gc=False):
    content: list[ChatTokenLogprobs]
    refusal: None = None


class AssistantMessage(Form, frozen=True, gc=False, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Choice, frozen=True, gc=False):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletionResponse(Form, frozen=True, gc=False, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_logprobs: list[PromptLogprobEntry] | None
    prompt_token_ids: list[int] | None


class Delta(Form, frozen=True, gc=False):
    content: str


class FirstDelta(Delta, frozen=True, gc=False):
    role: str = "assistant"


class ChatStreamChoice(_Choice, frozen=True, gc=False):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(Form, frozen=True, gc=False, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: Usage | None
    system_fingerprint: None = None
    prompt_token_ids: list[int] | None
