"""Turns logits into tokens. Everything here is a pure function of one row and its own parameters: a token never depends
on the batch it was sampled in, on the machine's thread count, or on what was sampled before.

Shape suffixes: N rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.engine.distribution import Distribution, uniform
from common.engine.grammar import GrammarMatcher
from common.engine.masks import asks_for_mask, mask_row, nothing_left
from common.engine.penalties import asks_for_penalty, penalize_row
from common.errors import InternalError, InvalidRequestError, MoerelayError
from common.id_mask import ID, pack_ids
from common.model.scores import LogitsRow, best_first
from common.sampling import SampledToken, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How one row is sampled: the token at absolute `position` of choice `choice`."""

    params: SamplingParams
    choice: int
    #: Absolute position of the token.
    position: int
    #: Stop and end-of-sequence ids that must not be sampled yet.
    banned: frozenset[int]
    #: The prompt, then what was generated so far.
    token_ids: Sequence[int]
    num_prompt: int
    #: Stands where the next token goes; None when the output is free. Sampling does not move it.
    matcher: GrammarMatcher | None = None
    #: Label of the weights that the logits come from.
    weight_version: str = ""

    @property
    def wants_raw_logprobs(self) -> bool:
        return self.params.logprobs is not None and not self.params.processed_logprobs

    @property
    def needs_distribution(self) -> bool:
        """Whether more must be known of the row than its best id."""
        params = self.params
        return params.temperature != 0 or (params.processed_logprobs and params.logprobs is not None)

    @property
    def shapes_logits(self) -> bool:
        """Whether the row is sampled from anything but its raw logits."""
        return asks_for_mask(self.params, self.banned, self.matcher) or asks_for_penalty(self.params)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        token_ids: Sequence[int],
        num_prompt: int,
        choice: int = 0,
        matcher: GrammarMatcher | None = None,
        weight_version: str = "",
    ) -> "SampleSpec":
        """The spec of the token after `token_ids`, which is read and neither kept beyond the step nor changed.

        As in vLLM, the first `min_tokens` tokens are neither stop ids nor end-of-sequence ids, `ignore_eos` or not.
        """
        early = len(token_ids) - num_prompt < params.min_tokens
        return cls(
            params=params,
            choice=choice,
            position=len(token_ids),
            banned=params.stop_token_ids | eos_token_ids if early else frozenset(),
            token_ids=token_ids,
            num_prompt=num_prompt,
            matcher=matcher,
            weight_version=weight_version,
        )


def sample(logits_NV: torch.Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken | MoerelayError]:
    """Samples one token per row, in vLLM's order: masks, bias, penalties, then temperature and filters.

    Args:
        logits_NV: fp32, any device; not changed.
        specs: one per row.

    Returns:
        Per row its token, or the error that ends this sequence (and no other): InternalError when its logits are not
        finite, InvalidRequestError when its parameters leave no token to choose from.
    """
    # Minimum and maximum pass NaN on, and are many times faster than a look at every element (or `aminmax`).
    finite_N = (logits_NV.amin(dim=1).isfinite() & logits_NV.amax(dim=1).isfinite()).tolist()
    shaped_NV, refusals = _shaped(logits_NV, specs)
    best_N, greedy_N = (t.tolist() for t in shaped_NV.max(dim=1))  # the first of equal maxima: the lowest id
    logprobs_NV = _raw_logprobs(logits_NV, specs)
    host_NV = shaped_NV.cpu().numpy() if any(spec.needs_distribution for spec in specs) else ()
    results: list[SampledToken | MoerelayError] = []
    for row, spec in enumerate(specs):
        if not finite_N[row]:
            results.append(InternalError(f"the logits for position {spec.position} are not finite"))
        elif row in refusals:
            results.append(refusals[row])
        elif best_N[row] == -math.inf:
            results.append(nothing_left(spec.params, spec.banned, spec.matcher))
        elif not math.isfinite(best_N[row]):
            results.append(InternalError(f"the shaped logits for position {spec.position} are not finite"))
        else:
            shaped_V = host_NV[row] if spec.needs_distribution else None
            results.append(_choose(shaped_V, greedy_N[row], spec, logprobs_NV.get(row)))
    return results


def _shaped(
    logits_NV: torch.Tensor, specs: Sequence[SampleSpec]
) -> tuple[torch.Tensor, dict[int, InvalidRequestError]]:
    """Logits after masks, bias and penalties, the input itself when no row asks for any; and rows that failed."""
    shaping = [(row, spec) for row, spec in enumerate(specs) if spec.shapes_logits]
    if not shaping:
        return logits_NV, {}
    shaped_NV = logits_NV.clone()
    refusals = {}
    for row, spec in shaping:
        generated = spec.token_ids[spec.num_prompt :]
        try:
            mask_row(shaped_NV[row], spec.params, spec.banned, generated, spec.matcher)
        except InvalidRequestError as error:
            refusals[row] = error
        if asks_for_penalty(spec.params):
            penalize_row(shaped_NV[row], spec.params, spec.token_ids, spec.num_prompt)
    return shaped_NV, refusals


def _raw_logprobs(logits_NV: torch.Tensor, specs: Sequence[SampleSpec]) -> dict[int, LogitsRow]:
    """fp32 log-softmax of the raw logits, for the rows that ask for it."""
    rows = [row for row, spec in enumerate(specs) if spec.wants_raw_logprobs]
    if not rows:
        return {}
    logprobs_MV = torch.log_softmax(logits_NV[rows].float(), dim=-1).cpu().numpy()
    return dict(zip(rows, logprobs_MV, strict=True))


def _choose(shaped_V: LogitsRow | None, greedy: int, spec: SampleSpec, logprobs_V: LogitsRow | None) -> SampledToken:
    """The token of one row and what is told about it.

    Args:
        shaped_V: if the spec needs the distribution.
        logprobs_V: the raw ones, if those are wanted.
    """
    params = spec.params
    if shaped_V is None:
        return _describe(greedy, spec, logprobs_V)
    distribution = Distribution.of(shaped_V, params)
    if params.logprobs is not None and params.processed_logprobs:
        logprobs_V = distribution.logprobs()
    if params.temperature == 0:
        return _describe(greedy, spec, logprobs_V)
    token_id = distribution.draw(uniform(params.seed, spec.choice, spec.position))
    survivors = distribution.survivors().astype(ID).tobytes() if params.sampling_mask else None
    return _describe(token_id, spec, logprobs_V, survivors)


def _describe(
    token_id: int, spec: SampleSpec, logprobs_V: LogitsRow | None, survivors: bytes | None = None
) -> SampledToken:
    """`survivors`: the packed ids that could have been drawn; None: this one only, or nobody asked."""
    mask = survivors
    if mask is None and spec.params.sampling_mask:
        mask = pack_ids((token_id,))
    if logprobs_V is None:
        return SampledToken(token_id, mask=mask, weight_version=spec.weight_version)
    top = best_first(logprobs_V, spec.params.logprobs) if spec.params.logprobs else ()
    return SampledToken(
        token_id=token_id,
        logprob=_token_logprob(token_id, logprobs_V),
        top=tuple(_token_logprob(int(i), logprobs_V) for i in top),
        mask=mask,
        weight_version=spec.weight_version,
    )


def _token_logprob(token_id: int, logprobs_V: LogitsRow) -> TokenLogprob:
    """Equally likely ids share the best of their ranks: one more than the number of ids that are more likely."""
    logprob = logprobs_V[token_id]
    return TokenLogprob(token_id, float(logprob), 1 + int(np.count_nonzero(logprobs_V > logprob)))
