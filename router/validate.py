"""From what a request asks for to the plans that workers run: every check that needs the model or the settings.

Sans-I/O. After this, prefill and decode workers never meet a bad request.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from common.config import RouterSettings
from common.errors import InvalidRequestError, NotFoundError
from common.sampling import INT64_MIN, SamplingParams
from router.defaults import SamplingDefaults
from router.plan import Ask, ModelLimits, Plan, TextOptions
from router.request_schemas import SamplingFields
from router.text.bad_words import encode_bad_words
from router.text.stop import StopStrings
from router.text.tokenizer import Tokenizer

ValueT = TypeVar("ValueT")

#: Visible ASCII, no spaces: safe in headers, logs and metrics.
_REQUEST_ID = re.compile(r"[!-~]{1,256}")
_TOKEN_ID_KEY = re.compile(r"0|[1-9][0-9]{0,9}")


def request_id(header: str | None, field: str | None, prefix: str) -> str:
    """The id the client gave, or a new one. Raises InvalidRequestError if it cannot be used."""
    given = header if header is not None else field
    if given is None:
        return f"{prefix}-{secrets.token_hex(8)}"
    if not _REQUEST_ID.fullmatch(given):
        raise InvalidRequestError("request_id must be 1 to 256 visible ASCII characters", param="request_id")
    return given


def check_model_name(name: str | None, served: str) -> None:
    """Raises NotFoundError unless the request names the served model or none."""
    if name is not None and name != served:
        raise NotFoundError(f"the model {name[:256]!r} does not exist; this server serves {served!r}", param="model")


def tokenizer_or_refusal(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    """Raises InvalidRequestError if text is needed and the cluster knows none."""
    if tokenizer is None:
        raise InvalidRequestError(
            f"{param} needs a tokenizer, and this server has none (its checkpoint lacks tokenizer.json, or the router "
            "was started without --model); send token ids to /inference/v1/generate",
            param=param,
        )
    return tokenizer


class Planner:
    """Turns requests into plans under one server's settings and the checkpoint's defaults."""

    def __init__(self, settings: RouterSettings, defaults: SamplingDefaults, tokenizer: Tokenizer | None) -> None:
        self._settings = settings
        self._defaults = defaults
        self._tokenizer = tokenizer

    def plan(self, ask: Ask, request_id: str, limits: ModelLimits) -> list[Plan]:
        """One plan per prompt; they differ in prompt and id only.

        Ids end in a random part: a client that comes back with the same id must not be refused because a worker has not
        let go of the call before.

        Raises:
            InvalidRequestError: naming the field.
        """
        self._check_counts(ask)
        for token_ids in ask.prompts:
            _check_prompt(token_ids, ask.prompt_param, limits)
        common, text, nonce = self._common_sampling(ask, limits), self._text(ask), secrets.token_hex(4)
        plans = [
            Plan(
                index=index,
                request_id=f"{request_id}-{index}-{nonce}",
                token_ids=token_ids,
                sampling=_fitted(common, ask, len(token_ids), limits),
                routing_start=self._routing_start(ask.sampling, len(token_ids)),
                text=text,
                priority=ask.priority,
                prompt_only=ask.prompt_only,
                cache_salt=ask.cache_salt,
            )
            for index, token_ids in enumerate(ask.prompts)
        ]
        self._check_masks(plans, limits)
        return plans

    def check_num_prompts(self, sent: Mapping[str, object]) -> None:
        """For dialects that take lists of prompts; `sent` is the body's JSON object.

        Raises:
            InvalidRequestError: a list of texts, or of lists, is longer than may be.
        """
        for name in ("prompt", "text", "input_ids"):
            value = sent.get(name)
            if isinstance(value, list) and isinstance((*value[:1], None)[0], str | list):
                _check_at_most(name, len(value), self._settings.max_prompts, "prompts")

    def check_num_messages(self, sent: Mapping[str, object]) -> None:
        """For conversations; `sent` is the body's JSON object. Raises InvalidRequestError if one has too many."""
        for name in ("messages", "tools", "documents"):
            value = sent.get(name)
            if isinstance(value, list):
                _check_at_most(name, len(value), self._settings.max_messages, "entries")

    def check_fan_out(self, num_prompts: int, n: int | None, prompt_param: str) -> None:
        """For dialects that make something of every prompt or choice, a text's ids say, before they can plan.

        Raises:
            InvalidRequestError: too many prompts, or choices of them.
        """
        settings = self._settings
        _check_at_most("n", n or 1, settings.max_n)
        _check_at_most(prompt_param, num_prompts, settings.max_prompts, "prompts")
        _check_at_most("n", num_prompts * (n or 1), settings.max_n, "choices of all prompts")

    def _check_counts(self, ask: Ask) -> None:
        """Everything that grows with a number the client chose, before anything is made of it."""
        settings, fields = self._settings, ask.sampling
        self.check_fan_out(len(ask.prompts), fields.n, ask.prompt_param)
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            listed: Collection[object] = getattr(fields, name) or ()
            _check_at_most(name, len(listed), settings.max_listed_tokens, "entries")
        self._check_texts("bad_words", fields.bad_words or [])
        self._check_texts("stop", _stops(fields))

    def _check_texts(self, name: str, texts: Sequence[str]) -> None:
        _check_at_most(name, len(texts), self._settings.max_stop_strings, "entries")
        for text in texts:
            if not text:
                raise InvalidRequestError(f"{name} must not contain an empty string", param=name)
            if len(text) > self._settings.max_stop_chars:
                raise InvalidRequestError(
                    f"{name}: a string of {len(text)} characters; at most {self._settings.max_stop_chars} are allowed",
                    param=name,
                )

    def _routing_start(self, fields: SamplingFields, prompt_len: int) -> int | None:
        start = fields.routed_experts_prompt_start or 0
        if start > prompt_len:
            raise InvalidRequestError(
                f"routed_experts_prompt_start must be between 0 and the prompt length ({prompt_len}), got {start}",
                param="routed_experts_prompt_start",
            )
        wanted = self._settings.enable_return_routed_experts and fields.return_routed_experts is not False
        return start if wanted else None

    def _check_masks(self, plans: Sequence[Plan], limits: ModelLimits) -> None:
        """Sampling masks may hold the whole vocabulary for every token, and are kept until they are sent."""
        if not plans[0].sampling.sampling_mask:
            return
        most = sum((p.sampling.top_k or limits.vocab_size) * p.sampling.max_tokens * p.sampling.n for p in plans)
        if most > self._settings.max_mask_ids:
            raise InvalidRequestError(
                f"return_sampling_mask: the masks may have {most} ids together, at most {self._settings.max_mask_ids} "
                "are allowed; lower top_k, max_tokens or n",
                param="return_sampling_mask",
            )

    def _common_sampling(self, ask: Ask, limits: ModelLimits) -> SamplingParams:
        """What is the same for all prompts; `_fitted` fills in the rest."""
        fields = ask.sampling
        stop_token_ids = frozenset(_known_ids(fields.stop_token_ids, limits, "stop_token_ids"))
        allowed = frozenset(_known_ids(fields.allowed_token_ids, limits, "allowed_token_ids"))
        top_k = _or(fields.top_k, self._defaults.top_k)
        return SamplingParams(
            n=fields.n or 1,
            max_tokens=1,
            temperature=_or(fields.temperature, self._defaults.temperature),
            top_p=_or(fields.top_p, self._defaults.top_p),
            top_k=0 if top_k == -1 else min(top_k, limits.vocab_size),
            min_p=_or(fields.min_p, self._defaults.min_p),
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(fields.ignore_eos),
            logprobs=self._num_logprobs("logprobs", fields.logprobs, limits),
            logit_bias=_logit_bias(fields, limits),
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            repetition_penalty=_or(fields.repetition_penalty, self._defaults.repetition_penalty),
            allowed_token_ids=allowed,
            bad_words=self._bad_words(fields),
            processed_logprobs=self._settings.logprobs_mode == "processed_logprobs",
            prompt_logprobs=self._num_logprobs("prompt_logprobs", fields.prompt_logprobs, limits),
            grammar=self._grammar(ask),
            sampling_mask=bool(fields.return_sampling_mask),
        )

    def _num_logprobs(self, name: str, wanted: int | None, limits: ModelLimits) -> int | None:
        if wanted is None:
            return None
        count = limits.vocab_size if wanted == -1 else wanted
        _check_at_most(name, count, self._settings.max_logprobs)
        return min(count, limits.vocab_size)

    def _bad_words(self, fields: SamplingFields) -> tuple[tuple[int, ...], ...]:
        if not fields.bad_words:
            return ()
        return encode_bad_words(fields.bad_words, tokenizer_or_refusal(self._tokenizer, "bad_words"))

    def _grammar(self, ask: Ask) -> str | None:
        if ask.grammar is not None:
            tokenizer_or_refusal(self._tokenizer, "structured_outputs")
        return ask.grammar

    def _text(self, ask: Ask) -> TextOptions:
        fields = ask.sampling
        stop = _stops(fields)
        if stop and fields.detokenize is False:
            raise InvalidRequestError("stop strings need detokenize to be true", param="stop")
        if stop:
            tokenizer_or_refusal(self._tokenizer, "stop")
        return TextOptions(
            shown=ask.wants_text,
            stops=StopStrings(stop, include=bool(fields.include_stop_str_in_output), min_tokens=fields.min_tokens or 0),
            skip_special_tokens=fields.skip_special_tokens is not False,
        )


def _fitted(common: SamplingParams, ask: Ask, prompt_len: int, limits: ModelLimits) -> SamplingParams:
    """What depends on the prompt. A seed that the client left out is drawn for each: equal prompts must differ."""
    room = limits.max_model_len - prompt_len
    max_tokens = 1 if ask.prompt_only else min(room, ask.sampling.max_tokens or room)
    min_tokens = min(_min_tokens(ask.sampling), max_tokens)
    _check_reachable(min_tokens, common.stop_token_ids, common.allowed_token_ids, limits)
    seed = INT64_MIN + secrets.randbits(64) if ask.sampling.seed is None else ask.sampling.seed
    return replace(common, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed)


def _or(value: ValueT | None, default: ValueT) -> ValueT:
    return default if value is None else value


def _stops(fields: SamplingFields) -> Sequence[str]:
    return [fields.stop] if isinstance(fields.stop, str) else fields.stop or []


def _check_at_most(name: str, value: int, bound: int, what: str = "") -> None:
    if value > bound:
        raise InvalidRequestError(f"{name} must be at most {bound}, got {value} {what}".rstrip(), param=name)


def _check_prompt(token_ids: Sequence[int], param: str, limits: ModelLimits) -> None:
    if not token_ids:
        raise InvalidRequestError(f"{param}: the prompt is empty; send at least one token", param=param)
    if len(token_ids) >= limits.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(token_ids)} tokens; at most {limits.max_model_len - 1} fit into the context of "
            f"{limits.max_model_len} together with one generated token",
            param=param,
        )
    _known_ids(token_ids, limits, param)


def _known_ids(ids: Sequence[int] | None, limits: ModelLimits, param: str) -> Sequence[int]:
    if ids and max(ids) >= limits.vocab_size:
        raise InvalidRequestError(
            f"{param}: token id {max(ids)} is out of vocabulary; ids are below {limits.vocab_size}", param=param
        )
    return ids or ()


def _min_tokens(fields: SamplingFields) -> int:
    minimum = fields.min_tokens or 0
    if fields.max_tokens is not None and minimum > fields.max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({minimum}) must not exceed max_tokens ({fields.max_tokens})", param="min_tokens"
        )
    return minimum


def _check_reachable(
    min_tokens: int, stop_token_ids: frozenset[int], allowed: frozenset[int], limits: ModelLimits
) -> None:
    """Before `min_tokens` neither stop nor end-of-sequence ids are sampled; one other id must be left."""
    ending = {i for i in stop_token_ids | limits.eos_token_ids if i < limits.vocab_size}
    left = len(allowed - ending) if allowed else limits.vocab_size - len(ending)
    if min_tokens and not left:
        raise InvalidRequestError(
            "every token that may be sampled is a stop token, so min_tokens cannot be reached; lower one of them",
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
