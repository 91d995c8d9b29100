"""What SGLang's clients send. The names are SGLang's, the meanings those of `router.request_schemas`."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from common.sampling import INT64_MAX
from router.request_schemas import (
    INT32_MAX,
    CacheSalt,
    ListOf,
    LogitBias,
    Penalty,
    RequestModel,
    Seed,
    Stops,
    TokenIds,
)

#: What this server cannot do and what would change the answer: refused unless null, empty or false.
Unsupported = Annotated[Any, Field(description="Not supported: only null, false or empty.")]

NumTop = Annotated[int, Field(ge=0, le=INT32_MAX)]
LogprobStart = Annotated[int, Field(ge=-1)]


def _shared(value: object) -> object:
    """What a batch spells once per prompt, once."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value[1:]):
        raise ValueError("the prompts of one request share their parameters; send those that differ apart")
    return value[0]


class SglangSamplingParams(RequestModel):
    """`sampling_params` of POST /generate."""

    n: int | None = Field(None, ge=1, description="Number of choices; more than one answers a list.")
    max_new_tokens: int | None = Field(None, ge=1, description="Absent: the rest of the context; clamped to it.")
    min_new_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX, description="0 or -1 is off.")
    min_p: float | None = Field(None, ge=0, le=1)
    sampling_seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=2)
    logit_bias: LogitBias | None = None
    stop: Stops | None = Field(None, description="Texts that end the output.")
    stop_token_ids: TokenIds | None = None
    no_stop_trim: bool | None = Field(None, description="Keep the stop string in the text.")
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="No effect, as with any fast tokenizer.")
    json_schema: str | None = Field(None, description="JSON schema, as text, that the output follows.")
    regex: str | None = None
    ebnf: str | None = Field(None, description="A grammar that the output follows.")
    stop_regex: Unsupported = None
    structural_tag: Unsupported = None
    custom_params: Unsupported = None


SharedSampling = Annotated[
    SglangSamplingParams | None,
    BeforeValidator(_shared, json_schema_input_type=SglangSamplingParams | list[SglangSamplingParams] | None),
]
SharedFlag = Annotated[bool | None, BeforeValidator(_shared, json_schema_input_type=bool | list[bool] | None)]
SharedStart = Annotated[
    LogprobStart | None, BeforeValidator(_shared, json_schema_input_type=LogprobStart | list[LogprobStart] | None)
]
SharedNumTop = Annotated[NumTop | None, BeforeValidator(_shared, json_schema_input_type=NumTop | list[NumTop] | None)]


class SglangGenerateRequest(RequestModel):
    """Body of POST /generate. Parameters may be lists, one entry per prompt; their entries must be equal."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["input_ids"]}, {"required": ["text"]}]})

    input_ids: TokenIds | ListOf[TokenIds] | None = Field(None, description="One prompt, or several.")
    text: str | ListOf[str] | None = Field(None, description="The same as text; exactly one of the two.")
    sampling_params: SharedSampling = None
    rid: str | ListOf[str] | None = Field(
        None, description="Id of the request, or one per prompt; the header X-Request-Id wins over a single one."
    )
    stream: bool | None = None
    return_logprob: SharedFlag = None
    logprob_start_len: SharedStart = Field(
        None, description="First prompt position with a logprob, with `return_logprob`; -1: none."
    )
    top_logprobs_num: SharedNumTop = Field(None, description="Alternatives per token.")
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = Field(None, description="Absent: no rows, as in SGLang.")
    routed_experts_start_len: int | None = Field(
        None, ge=0, description="First position whose row is returned, at most the prompt length."
    )
    priority: int | None = Field(
        None, ge=-INT64_MAX, le=INT64_MAX, description="Higher is admitted first; equal ones in order of arrival."
    )
    extra_key: CacheSalt | None = Field(None, description="Prefixes are cached apart for each key.")
    cache_salt: CacheSalt | None = Field(None, description="vLLM's name of `extra_key`; send only one of them.")
    token_ids_logprob: Unsupported = None
    input_embeds: Unsupported = None
    image_data: Unsupported = None
    video_data: Unsupported = None
    audio_data: Unsupported = None
    lora_path: Unsupported = None
    session_params: Unsupported = None
    custom_logit_processor: Unsupported = None
    return_hidden_states: Unsupported = None
    return_entropy: Unsupported = None


class SglangAbortRequest(RequestModel):
    """Body of POST /abort_request."""

    rid: str | None = Field(None, description="An id that an answer bears in `meta_info.id`, or a request's own.")
    abort_all: bool | None = Field(
        None, description="Every live request of this router; where clients have keys, for administrators."
    )
