"""From a request as sent to the choices that workers run: every check that needs the model or the settings.

Sans-I/O. After this, prefill and decode workers never meet a bad request.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from common.config import RouterSettings
from common.errors import InvalidRequestError, NotFoundError
from common.pb import types_pb2
from common.routing.record import RoutingLayout
from common.sampling import INT64_MIN, SamplingParams
from router.defaults import SamplingDefaults
from router.request_schemas import GenerateRequest, SamplingFields

ValueT = TypeVar("ValueT")

#: Visible ASCII, no spaces: safe in headers, logs and metrics.
_REQUEST_ID = re.compile(r"[!-~]{1,256}")
_TOKEN_ID_KEY = re.compile(r"0|[1-9][0-9]{0,9}")

#: Known fields that are not supported, with the values that mean "not used".
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "routed_experts_format": ("npy",),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "stop": ([],),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "structured_outputs": ({},),
    "return_sampling_mask": (False,),
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against: the model that the fleet serves."""

    vocab_size: int
    max_model_len: int
    layout: RoutingLayout
    weight_version: str
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, model: types_pb2.ModelDescription) -> "ModelLimits":
        layout = RoutingLayout(model.num_layers, model.top_k, model.num_experts)
        return cls(model.vocab_size, model.max_model_len, layout, model.weight_version, frozenset(model.eos_token_ids))


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice, ready to run. `routing_start` is None when no rows are wanted."""

    index: int
    #: Unique on every worker.
    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    routing_start: int | None

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids)


def request_id(header: str | None, field: str | None) -> str:
    """The id the client gave, or a new one. Raises InvalidRequestError if it cannot be used."""
    given = header if header is not None else field
    if given is None:
        return f"generate-tokens-{secrets.token_hex(8)}"
    if not _REQUEST_ID.fullmatch(given):
        raise InvalidRequestError("request_id must be 1 to 256 visible ASCII characters", param="request_id")
    return given


def check_model_name(name: str | None, served: str) -> None:
    """Raises NotFoundError unless the request names the served model or none."""
    if name is not None and name != served:
        raise NotFoundError(f"the model {name!r} does not exist; this server serves {served!r}", param="model")


class Planner:
    """Turns requests into choices under one server's settings and the checkpoint's defaults."""

    def __init__(self, settings: RouterSettings, defaults: SamplingDefaults) -> None:
        self._settings = settings
        self._defaults = defaults

    def plan(self, request: GenerateRequest, request_id: str, limits: ModelLimits) -> list[ChoicePlan]:
        """One plan per choice; the choices differ in index and id only.

        Ids end in a random part: a client that comes back with the same id must not be refused because a worker has not
        let go of the call before.

        Raises:
            InvalidRequestError: naming the field.
        """
        fields = request.sampling_params
        _check_prompt(request.token_ids, limits)
        _check_supported(request)
        start = self._routing_start(fields, len(request.token_ids))
        sampling = self._sampling(fields, len(request.token_ids), limits)
        nonce = secrets.token_hex(4)
        return [
            ChoicePlan(
                index, f"{request_id}-{index}-{nonce}", request.token_ids, replace(sampling, choice=index), start
            )
            for index in range(self._num_choices(fields))
        ]

    def _num_choices(self, fields: SamplingFields) -> int:
        n = fields.n or 1
        if n > self._settings.max_n:
            raise InvalidRequestError(f"n must be at most {self._settings.max_n}, got {n}", param="n")
        return n

    def _routing_start(self, fields: SamplingFields, prompt_len: int) -> int | None:
        start = fields.routed_experts_prompt_start or 0
        if start > prompt_len:
            raise InvalidRequestError(
                f"routed_experts_prompt_start must be between 0 and the prompt length ({prompt_len}), got {start}",
                param="routed_experts_prompt_start",
            )
        wanted = self._settings.enable_return_routed_experts and fields.return_routed_experts is not False
        return start if wanted else None

    def _sampling(self, fields: SamplingFields, prompt_len: int, limits: ModelLimits) -> SamplingParams:
        room = limits.max_model_len - prompt_len
        max_tokens = min(room, fields.max_tokens or room)
        min_tokens = min(_min_tokens(fields), max_tokens)
        stop_token_ids = _stop_token_ids(fields, limits)
        _check_reachable(min_tokens, stop_token_ids, limits)
        top_k = _or(fields.top_k, self._defaults.top_k)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=_or(fields.temperature, self._defaults.temperature),
            top_p=_or(fields.top_p, self._defaults.top_p),
            top_k=0 if top_k == -1 else min(top_k, limits.vocab_size),
            min_p=_or(fields.min_p, self._defaults.min_p),
            seed=INT64_MIN + secrets.randbits(64) if fields.seed is None else fields.seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(fields.ignore_eos),
            logprobs=self._logprobs(fields, limits),
            logit_bias=_logit_bias(fields, limits),
        )

    def _logprobs(self, fields: SamplingFields, limits: ModelLimits) -> int | None:
        if fields.logprobs is None:
            return None
        if fields.logprobs > self._settings.max_logprobs:
            raise InvalidRequestError(
                f"logprobs must be at most {self._settings.max_logprobs}, got {fields.logprobs}", param="logprobs"
            )
        return min(fields.logprobs, limits.vocab_size)


def _or(value: ValueT | None, default: ValueT) -> ValueT:
    return default if value is None else value


def _check_prompt(token_ids: Sequence[int], limits: ModelLimits) -> None:
    if len(token_ids) >= limits.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(token_ids)} tokens; at most {limits.max_model_len - 1} fit into the context of "
            f"{limits.max_model_len} together with one generated token",
            param="token_ids",
        )
    _check_vocabulary(token_ids, limits, "token_ids")


def _check_vocabulary(ids: Sequence[int], limits: ModelLimits, param: str) -> None:
    if ids and max(ids) >= limits.vocab_size:
        raise InvalidRequestError(
            f"{param}: token id {max(ids)} is out of vocabulary; ids are below {limits.vocab_size}", param=param
        )


def _check_supported(request: GenerateRequest) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(request.sampling_params, name)
        if value is not None and value not in neutral:
            raise InvalidRequestError(f"{name} is not supported here; leave it out", param=name)
    if request.kv_transfer_params:
        raise InvalidRequestError("kv_transfer_params must be null or empty", param="kv_transfer_params")


def _min_tokens(fields: SamplingFields) -> int:
    minimum = fields.min_tokens or 0
    if fields.max_tokens is not None and minimum > fields.max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({minimum}) must not exceed max_tokens ({fields.max_tokens})", param="min_tokens"
        )
    return minimum


def _stop_token_ids(fields: SamplingFields, limits: ModelLimits) -> frozenset[int]:
    ids = fields.stop_token_ids or []
    _check_vocabulary(ids, limits, "stop_token_ids")
    return frozenset(ids)


def _check_reachable(min_tokens: int, stop_token_ids: frozenset[int], limits: ModelLimits) -> None:
    """Before `min_tokens` neither stop nor end-of-sequence ids are sampled; one other id must be left."""
    ending = {i for i in stop_token_ids | limits.eos_token_ids if i < limits.vocab_size}
    if min_tokens and len(ending) == limits.vocab_size:
        raise InvalidRequestError(
            "every token of the vocabulary is a stop token, so min_tokens cannot be reached; lower one of them",
            param="min_tokens",
        )


def _logit_bias(fields: SamplingFields, limits: ModelLimits) -> dict[int, float]:
    bias = fields.logit_bias or {}
    for key in bias:
        if not _TOKEN_ID_KEY.fullmatch(key) or int(key) >= limits.vocab_size:
            raise InvalidRequestError(
                f"logit_bias: {key[:32]!r} is not a token id; keys are decimal numbers below {limits.vocab_size}",
                param="logit_bias",
            )
    return {int(key): value for key, value in bias.items()}
