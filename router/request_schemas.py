"""What clients send to the vLLM endpoints. `/openapi.json` is generated from these models.

Requests are strict: a boolean is not an integer, a string is not a number. An explicit null means "absent". Fields that
no model knows are ignored (`router.json_body` logs each name once).
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from common.sampling import INT64_MAX, INT64_MIN

ItemT = TypeVar("ItemT")

#: A list of 100,000 bad entries gives one error, not 100,000.
ListOf = Annotated[list[ItemT], Field(fail_fast=True)]

TokenIds = ListOf[Annotated[int, Field(ge=0)]]

INT32_MAX = 2**31 - 1

CacheSalt = Annotated[
    str,
    Field(min_length=1, max_length=1024, description="Prefixes are cached apart for each salt."),
]
Priority = Annotated[
    int, Field(ge=INT64_MIN, le=INT64_MAX, description="Lower is admitted first; equal ones in order of arrival.")
]


class RequestModel(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


def _refuse(value: object) -> None:
    """Null, false and what is empty ask for nothing."""
    if value is not None and value is not False and value not in ([], {}):
        raise PydanticCustomError("not_supported", "this server does not support it; leave it out")


#: A field that clients of vLLM know and that would change the answer, but cannot be honoured.
Refused = Annotated[
    None,
    BeforeValidator(_refuse),
    WithJsonSchema({"enum": [None, False, [], {}]}),
    Field(description="Not supported: only null, false or empty."),
]


class StreamOptions(RequestModel):
    """How a stream is cut into events; ignored without `stream`."""

    include_usage: bool | None = Field(None, description="Send the usage in a last event with no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every event.")
    routed_experts: Literal["delta", "final"] | None = Field(
        None, description="delta: rows travel with their tokens; final: all rows on the terminal event."
    )
    max_event_bytes: int | None = Field(
        None, ge=1024, description="Largest event of a delta stream; one row or one token is sent whatever its size."
    )


class StructuredOutputs(RequestModel):
    """What the output must follow: one of json, regex, choice, grammar and json_object."""

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="JSON schema, as object or as text.")
    regex: str | None = Field(None, description="Regular expression of the whole output.")
    choice: ListOf[str] | None = Field(None, description="The output is one of these strings.")
    grammar: str | None = Field(None, description="A grammar in llguidance's Lark dialect, or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    disable_any_whitespace: bool | None = Field(None, description="JSON without white space between its tokens.")
    whitespace_pattern: str | None = Field(None, description="Regular expression of white space in JSON.")
    disable_additional_properties: bool | None = Field(None, description="Only null or false.")
    structural_tag: str | None = Field(None, description="Only null.")


#: How rows are worded: a base64 .npy file, or prime-rl's object.
RowsFormat = Literal["npy", "dict"]

Penalty = Annotated[float, Field(ge=-2, le=2)]

#: Largest amount of a bias.
MAX_BIAS = 100


def _fail_fast(biases: object) -> object:
    """Finds the first bad entry, where pydantic would describe every one."""
    if isinstance(biases, dict):
        for key, value in biases.items():
            if type(value) not in (int, float) or not -MAX_BIAS <= value <= MAX_BIAS:
                raise ValueError(f"the bias of {key[:32]!r} must be a number between -{MAX_BIAS} and {MAX_BIAS}")
    return biases


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    BeforeValidator(_fail_fast),
    Field(description="Vocabulary id, as a decimal string, to what is added to its logit."),
]
Seed = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX, description="Drawn by the router when absent.")]
#: -1 asks for the whole vocabulary, which the server's limit must allow.
NumLogprobs = Annotated[int, Field(ge=-1, le=INT32_MAX)]
Stops = str | ListOf[str]


class CommonSamplingFields(RequestModel):
    """Sampling fields that are the same in `sampling_params` and at the top of the OpenAI endpoints' requests."""

    n: int | None = Field(None, ge=1, description="Number of choices, each with its own tokens and rows.")
    temperature: float | None = Field(None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="The most likely ids with this mass; 1 is off.")
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX, description="So many of the most likely ids; 0 or -1 is off.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Ids at least this share as likely as the first; 0 is off."
    )
    seed: Seed | None = None
    presence_penalty: Penalty | None = Field(None, description="Once for every id generated before.")
    frequency_penalty: Penalty | None = Field(None, description="For each time an id was generated before.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=2, description="Over prompt and output; 1 is off.")
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = Field(None, description="The only ids that may be sampled.")
    bad_words: ListOf[str] | None = Field(None, description="Texts that the output must not contain.")
    stop: Stops | None = Field(None, description="Texts that end the output.")
    stop_token_ids: TokenIds | None = Field(None, description="Ids that end the output.")
    ignore_eos: bool | None = Field(None, description="End-of-sequence ids do not end the output.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep what ended the output in its text.")
    min_tokens: int | None = Field(None, ge=0, description="So many tokens come first that do not end the output.")
    prompt_logprobs: NumLogprobs | None = Field(
        None, description="Alternatives per prompt token; absent: no logprobs of the prompt. Not with `stream`."
    )
    skip_special_tokens: bool | None = Field(None, description="Whether texts, and stops, see special tokens.")
    structured_outputs: StructuredOutputs | None = Field(None, description="What the output must follow.")
    routed_experts_prompt_start: int | None = Field(
        None, ge=0, description="First position whose row is returned, at most the prompt length."
    )
    return_routed_experts: bool | None = Field(None, description="False switches routing rows off for this request.")
    routed_experts_format: RowsFormat | None = Field(None, description="Overrides the server's format of rows.")
    return_sampling_mask: bool | None = Field(None, description="Report the ids that survived top-k, top-p, min-p.")
    use_beam_search: Refused = None
    truncate_prompt_tokens: Refused = None
    logprob_token_ids: Refused = None
    repetition_detection: Refused = None
    thinking_token_budget: Refused = None
    logits_processors: Refused = None
    extra_args: Refused = None


class SamplingFields(CommonSamplingFields):
    """`sampling_params`, and what every other dialect is translated into."""

    max_tokens: int | None = Field(None, ge=1, description="Absent: the rest of the context; clamped to the context.")
    logprobs: NumLogprobs | None = Field(None, description="Alternatives per token; absent: no logprobs.")
    detokenize: bool | None = Field(None, description="False is incompatible with `stop`; else no effect on ids.")


class GenerateRequest(RequestModel):
    """Body of POST /inference/v1/generate: tokens in, tokens out."""

    token_ids: Annotated[TokenIds, Field(min_length=1)] = Field(
        description="Prompt; each id below the vocabulary size."
    )
    sampling_params: SamplingFields
    request_id: str | None = Field(None, description="The header X-Request-Id wins.")
    model: str | None = Field(None, description="The served name, or absent.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Also return the prompt's ids.")
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    features: Refused = None
    kv_transfer_params: dict[str, Any] | None = Field(None, description="Only null or an empty object.")


class AbortRequestsRequest(RequestModel):
    """Body of POST /inference/v1/abort_requests."""

    request_ids: ListOf[str] = Field(min_length=1)
