"""Random requests for `moerelay verify`: a pure function of the seed, so that two runs can be compared."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from common.sampling import INT64_MAX, INT64_MIN, SamplingParams

#: Lengths around the edges of blocks of 16 tokens, where off-by-one errors live.
_EDGE_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33)
#: Each so many requests, one repeats its predecessor in another form.
_REPEAT_EVERY = 5
_NUM_SHARED_PREFIXES = 3


class Form(StrEnum):
    """How the answer is asked for; the bytes must not depend on it."""

    WHOLE = "whole"
    DELTA = "delta"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class CaseLimits:
    """What requests may look like; lengths are upper bounds."""

    vocab_size: int
    max_model_len: int
    max_prompt: int
    max_output: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `sampling.max_tokens` is clamped to the context already; `asked_max_tokens` is what is sent."""

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    asked_max_tokens: int
    routing_start: int
    form: Form

    def body(self) -> dict[str, Any]:
        """The JSON body of POST /inference/v1/generate. Every field is explicit: no default of the server counts."""
        s = self.sampling
        sampling: dict[str, Any] = {
            "max_tokens": self.asked_max_tokens,
            "min_tokens": s.min_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "seed": s.seed,
            "stop_token_ids": sorted(s.stop_token_ids),
            "ignore_eos": s.ignore_eos,
            "logprobs": s.logprobs,
            "logit_bias": {str(token_id): bias for token_id, bias in s.logit_bias.items()},
            "routed_experts_prompt_start": self.routing_start,
        }
        body: dict[str, Any] = {"token_ids": list(self.prompt), "sampling_params": sampling}
        if self.form is not Form.WHOLE:
            body |= {"stream": True, "stream_options": {"include_usage": True, "routed_experts": self.form.value}}
        return body


def make_case(seed: int, index: int, limits: CaseLimits) -> Case:
    """Request number `index` of the run that `seed` names."""
    if index % _REPEAT_EVERY == _REPEAT_EVERY - 1:
        previous = make_case(seed, index - 1, limits)
        forms = list(Form)
        return replace(previous, index=index, form=forms[(forms.index(previous.form) + 1) % len(forms)])
    rng = random.Random(f"{seed}:{index}")
    prompt = _prompt(rng, seed, limits)
    asked = rng.choice((1, 2, limits.max_output, rng.randint(1, limits.max_output)))
    max_tokens = min(asked, limits.max_model_len - len(prompt))
    return Case(
        index=index,
        prompt=prompt,
        sampling=_sampling(rng, max_tokens, limits),
        asked_max_tokens=asked,
        routing_start=rng.choice((0, 0, 0, len(prompt), rng.randint(0, len(prompt)))),
        form=rng.choice(list(Form)),
    )


def _prompt(rng: random.Random, seed: int, limits: CaseLimits) -> tuple[int, ...]:
    """Sometimes of an edge length, sometimes with a beginning that other prompts share."""
    longest = min(limits.max_prompt, limits.max_model_len - 1)
    length = min(longest, rng.choice(_EDGE_LENGTHS)) if rng.random() < 0.25 else rng.randint(1, longest)
    own = [rng.randrange(limits.vocab_size) for _ in range(length)]
    if rng.random() < 0.2:
        shared = random.Random(f"{seed}:prefix:{rng.randrange(_NUM_SHARED_PREFIXES)}")
        num_shared = rng.randint(0, length)
        own[:num_shared] = [shared.randrange(limits.vocab_size) for _ in range(num_shared)]
    return tuple(own)


def _sampling(rng: random.Random, max_tokens: int, limits: CaseLimits) -> SamplingParams:
    stop_ids = rng.sample(range(limits.vocab_size), k=min(64, max(1, limits.vocab_size // 20)))
    common = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
        temperature=0.0,
        seed=rng.randint(INT64_MIN, INT64_MAX),
        stop_token_ids=frozenset(stop_ids if rng.random() < 0.3 else ()),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice((None, None, 0, 1, 5)),
        logit_bias=_logit_bias(rng, limits),
    )
    if rng.random() < 0.4:
        return common  # greedy
    return replace(
        common,
        temperature=round(rng.uniform(0.3, 1.5), 3),
        top_p=rng.choice((1.0, 0.9, 0.5)),
        top_k=rng.choice((0, 1, 5, 50)),
        min_p=rng.choice((0.0, 0.05, 0.2)),
    )


def _logit_bias(rng: random.Random, limits: CaseLimits) -> dict[int, float]:
    """Mostly none; sometimes a few nudges, sometimes an end-of-sequence token that is sure to come."""
    kind = rng.random()
    if kind < 0.1 and limits.eos_token_ids:
        return {min(limits.eos_token_ids): 100.0}
    if kind < 0.3:
        return {rng.randrange(limits.vocab_size): round(rng.uniform(-5, 5), 2) for _ in range(3)}
    return {}
