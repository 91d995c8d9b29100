"""What SGLang's clients read. A key with nothing to say is absent, as in SGLang: clients ask whether it is there."""

from typing import Literal

from pydantic import Field, RootModel

from router.response_schemas import ResponseModel, WeightVersion

#: [logprob, id, text]. The text is null unless the request asked for it.
LogprobTriple = tuple[float, int, str | None]
#: The same of a prompt token; the first one has no logprob.
InputLogprobTriple = tuple[float | None, int, str | None]


class SglangFinishReason(ResponseModel):
    """Why a choice ended: beside the type, `matched` (stop), `length` (length) or `message` (abort)."""

    type: Literal["stop", "length", "abort"]
    matched: int | str = Field(-1, description="The token id or the stop string that ended the choice.")
    length: int = Field(0, description="Number of generated tokens.")
    message: str = ""


class SglangMetaInfo(ResponseModel):
    """All about a choice that is not text or ids.

    `routed_experts` is base64 (padded, no newlines) of little-endian int32, C order, without a header:
    `(prompt_tokens + completion_tokens - 1 - routed_experts_start_len) * num_layers * top_k` expert ids. It is there if
    the request asked for it and the server returns rows, but not when the choice was aborted before its first token. In
    a stream it comes with the last event of the choice, as the `input_…` lists do.
    """

    id: str
    finish_reason: SglangFinishReason | None = Field(description="Null while a stream goes on.")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str = Field(description="Of the weights that the last token came from.")
    weight_versions: list[WeightVersion]
    e2e_latency: float = Field(description="Seconds since the request arrived.")
    output_token_logprobs: list[LogprobTriple] = Field([])
    output_top_logprobs: list[list[LogprobTriple]] = Field([])
    input_token_logprobs: list[InputLogprobTriple] = Field(
        [], description="Of the prompt from `logprob_start_len` on; the first logprob is null."
    )
    input_top_logprobs: list[list[LogprobTriple] | None] = Field([])
    routed_experts: str = ""
    routed_experts_start_len: int = 0


class SglangOutput(ResponseModel):
    """One choice. In a stream everything is cumulative: an event repeats what came before."""

    text: str = Field(description="Empty if the server has no tokenizer.")
    output_ids: list[int]
    meta_info: SglangMetaInfo
    index: int = Field(0, description="Position of the choice in the batch; only in streams of several choices.")


class SglangAnswer(RootModel[SglangOutput | list[SglangOutput]]):
    """One choice; of a list of prompts, or with `n` above 1, a list in the order of prompts and choices."""


class SglangAbortAnswer(ResponseModel):
    """The requests, or choices of a batch, that have been told to stop."""

    aborted: list[str]


class SglangModelInfo(ResponseModel):
    """Answer of GET /get_model_info. Paths are null when the router was started without `--model`."""

    model_path: str | None
    tokenizer_path: str | None
    is_generation: Literal[True]
    preferred_sampling_params: None
    weight_version: str | None
    model_type: str | None = Field(description="Null until a worker has answered, as `weight_version` is.")
    has_image_understanding: Literal[False]
    has_audio_understanding: Literal[False]


class SglangServerInfo(ResponseModel):
    """Answer of GET /get_server_info: the settings that mean the same here."""

    version: str
    served_model_name: str
    model_path: str | None
    tokenizer_path: str | None
    skip_tokenizer_init: bool
    enable_return_routed_experts: bool
    context_length: int | None
    weight_version: str | None


class SglangHealth(ResponseModel):
    """A token has just been generated."""

    status: Literal["ok"]
