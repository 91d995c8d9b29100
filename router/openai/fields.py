"""Fields that completions and chat completions share: OpenAI's, and vLLM's additions."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from router.request_schemas import (
    CacheSalt,
    CommonSamplingFields,
    Priority,
    Refused,
    RequestModel,
    SamplingFields,
    StreamOptions,
)


class TextFormat(RequestModel):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestModel):
    """A JSON schema; it is always enforced, whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class OpenAIRequest(CommonSamplingFields):
    """What both endpoints take beside the prompt, the limits and logprobs."""

    model: str | None = Field(None, description="The served name, or absent.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="No effect.")
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    echo: bool | None = Field(
        None, description="Show the prompt, or a last message by the assistant, before the output."
    )
    return_token_ids: bool | None = Field(None, description="Also return ids: the prompt's and the output's.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Tokens in logprobs are spelled "token_id:7" instead of as text.'
    )
    spaces_between_special_tokens: bool | None = Field(None, description="No effect: text is never padded.")
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    request_id: str | None = Field(None, description="The header X-Request-Id wins.")
    kv_transfer_params: dict[str, Any] | None = Field(None, max_length=0, description="Only null or an empty object.")
    ec_transfer_params: Refused = None
    watermarking: Refused = None
    vllm_xargs: Refused = None

    @model_validator(mode="after")
    def _asks_for_what_goes_together(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs are not available with stream: leave one of them out", param="prompt_logprobs"
            )
        if self.structured_outputs is not None and self.wanted_format is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs exclude one another: leave one of them out",
                param="response_format",
            )
        return self

    @property
    def wanted_format(self) -> ResponseFormat | None:
        """`response_format`, if it constrains anything."""
        return None if isinstance(self.response_format, TextFormat) else self.response_format

    @property
    def options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    @property
    def writes_special_tokens(self) -> bool:
        return self.skip_special_tokens is False

    def sampling_with(self, **fields: object) -> SamplingFields:
        """The shared fields, as `/inference/v1/generate` has them, and those given.

        Streams carry rows only if `stream_options.routed_experts` asks for them; else workers need not ship any.
        """
        shared = {name: getattr(self, name) for name in CommonSamplingFields.model_fields}
        if self.stream and self.options.routed_experts is None:
            shared["return_routed_experts"] = False
        return SamplingFields.model_construct(**shared | fields)
