"""Bodies of the OpenAI endpoints, of /tokenize and of /detokenize."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from router.openai.fields import OpenAIRequest
from router.openai.messages import Message
from router.request_schemas import ListOf, NumLogprobs, Refused, RequestModel, SamplingFields, TokenIds

_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[TokenIds, Field(min_length=1)]


def _kind_of_prompt(value: object) -> str | None:
    """What the first element says; so errors are about one form, and a long list is read once."""
    first = value[0] if isinstance(value, list) and value else None
    match value, first:
        case str(), _:
            return "text"
        case list(), str():
            return "texts"
        case list(), list():
            return "lists of ids"
        case list(), _:
            return "ids"
        case _:
            return None


PromptField = Annotated[
    Annotated[_Text, Tag("text")]
    | Annotated[list[_Text], Tag("texts"), Field(min_length=1, fail_fast=True)]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[list[_Ids], Tag("lists of ids"), Field(min_length=1, fail_fast=True)],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="send a text, a list of texts, a list of token ids, or a list of such lists",
    ),
]


class CompletionRequest(OpenAIRequest):
    """Body of POST /v1/completions: text or token ids in; text, ids and experts out."""

    prompt: PromptField = Field(description="One prompt, or several; none of them empty.")
    max_tokens: int | None = Field(
        None, ge=0, description="Absent: the rest of the context; clamped to the context. 0 with echo: the prompt only."
    )
    logprobs: NumLogprobs | None = Field(None, description="Alternatives per token; absent: no logprobs.")
    best_of: int | None = Field(None, ge=1, description="Absent, or equal to n.")
    suffix: Refused = None
    prompt_embeds: Refused = None

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1, got 0; 0 needs echo", param="max_tokens")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"best_of must be equal to n ({self.n or 1}) or absent, got {self.best_of}", param="best_of"
            )
        return self

    @property
    def texts(self) -> list[str]:
        """Prompts sent as text, else empty."""
        return [text for text in self._listed() if isinstance(text, str)]

    @property
    def ids(self) -> list[list[int]]:
        """Prompts sent as token ids, else empty."""
        return [ids for ids in self._listed() if isinstance(ids, list)]

    def _listed(self) -> Sequence[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else cast(Sequence[str | list[int]], prompt)

    def sampling(self) -> SamplingFields:
        """In vLLM's terms; echo with logprobs needs those of the prompt."""
        echoed = self.logprobs if self.echo else None
        return self.sampling_with(
            max_tokens=self.max_tokens or None,
            logprobs=self.logprobs,
            prompt_logprobs=_at_least(self.prompt_logprobs, echoed),
        )


def _at_least(one: int | None, other: int | None) -> int | None:
    """As many alternatives as either asks for; -1 is all."""
    if one is None or other is None:
        return other if one is None else one
    return -1 if -1 in (one, other) else max(one, other)


def _refuse_tool_calls(value: object) -> object:
    if value not in ("none", "auto", None):
        raise PydanticCustomError("tool_choice", 'no tool parser here: tool_choice can be "none" or "auto"')
    return value


ToolChoice = Annotated[
    Literal["none", "auto"] | None,
    BeforeValidator(_refuse_tool_calls),
    WithJsonSchema({"enum": ["none", "auto", None]}),
]


Messages = Annotated[ListOf[Message], Field(min_length=1)]


class FunctionTool(RequestModel):
    """One tool as the chat template sees it, with whatever else the client says about it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: dict[str, Any]

    def as_sent(self) -> dict[str, object]:
        return self.model_dump(exclude_unset=True)


class TemplateFields(RequestModel):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = Field(None, description="Begin the answer; default: true.")
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open, so that the output continues it."
    )
    tools: ListOf[FunctionTool] | None = Field(None, min_length=1, description="Given to the chat template.")
    documents: ListOf[dict[str, Any]] | None = Field(None, description="Given to the chat template.")
    reasoning_effort: str | None = Field(None, max_length=64, description="Given to the chat template.")
    chat_template: Refused = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Given to the chat template.")

    @model_validator(mode="after")
    def _is_open_or_answered(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude one another", param="continue_final_message"
            )
        return self

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends with the beginning of an assistant's message."""
        return self.add_generation_prompt is not False and not self.continue_final_message


class ChatCompletionRequest(TemplateFields, OpenAIRequest):
    """Body of POST /v1/chat/completions. `add_special_tokens` defaults to false: templates write their own."""

    messages: Messages = Field(description="The conversation; its content is text.")
    max_tokens: int | None = Field(None, ge=1, description="Absent: the rest of the context; clamped to the context.")
    max_completion_tokens: int | None = Field(None, ge=1, description="The same; wins over max_tokens.")
    logprobs: bool | None = Field(None, description="Whether tokens come with logprobs.")
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives per token; needs logprobs.")
    tool_choice: ToolChoice = None
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    mm_processor_kwargs: Refused = None
    media_io_kwargs: Refused = None

    @model_validator(mode="after")
    def _logprobs_are_on(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                f"top_logprobs ({self.top_logprobs}) needs logprobs to be true", param="top_logprobs"
            )
        return self

    def sampling(self) -> SamplingFields:
        """In vLLM's terms."""
        return self.sampling_with(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    @property
    def echoed(self) -> str:
        """With echo, the text of a last message by the assistant: it goes in front of every answer."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""


class TokenizeRequest(TemplateFields):
    """Body of POST /tokenize: a text, or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    model: str | None = Field(None, description="The served name, or absent.")
    add_special_tokens: bool | None = Field(None, description="Default: true for a text, false for messages.")
    return_token_strs: bool | None = Field(None, description="Also return the text of every token.")

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("send either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(RequestModel):
    """Body of POST /detokenize. Special tokens are written."""

    tokens: TokenIds
    model: str | None = Field(None, description="The served name, or absent.")
