"""Turns logits into tokens. Everything here is a pure function of one row and its own parameters: a token never depends
on the batch it was sampled in, on the machine's thread count, or on what was sampled before.

Shape suffixes: N rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.grammar import GrammarMatcher
from common.errors import InternalError, InvalidRequestError, MoerelayError
from common.model.scores import best_first
from common.sampling import SampledToken, SamplingParams, TokenLogprob

LogitsRow = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.int64]

#: Candidates that are sorted first when a nucleus is looked for; nearly always they are enough.
NUCLEUS_HEAD = 1024


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
    """Samples one token per row.

    Args:
        logits_NV: fp32, any device; not changed.
        specs: one per row.

    Returns:
        Per row its token, or the error that ends this sequence (and no other): InternalError when its logits are not
        finite, InvalidRequestError when its parameters leave no token to choose from.
    """
    # Minimum and maximum pass NaN on, and are many times faster than a look at every element (or `aminmax`).
    finite_N = (logits_NV.amin(dim=1).isfinite() & logits_NV.amax(dim=1).isfinite()).tolist()
    shaped_NV = _shaped(logits_NV, specs)
    best_N, greedy_N = (t.tolist() for t in shaped_NV.max(dim=1))  # the first of equal maxima: the lowest id
    logprobs_NV = _logprobs(logits_NV, specs)
    results: list[SampledToken | MoerelayError] = []
    for row, spec in enumerate(specs):
        if not finite_N[row]:
            results.append(InternalError(f"the logits for position {spec.position} are not finite"))
        elif best_N[row] == -math.inf:
            results.append(_nothing_left())
        else:
            token = greedy_N[row] if spec.params.temperature == 0 else _draw(shaped_NV[row].cpu().numpy(), spec)
            results.append(_describe(token, spec, logprobs_NV.get(row)))
    return results


def _nothing_left() -> InvalidRequestError:
    return InvalidRequestError(
        "every token of the vocabulary is a stop token, so min_tokens cannot be reached; lower one of them",
        param="min_tokens",
    )


def _shaped(logits_NV: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Logits with bias added and banned ids at -inf; the input itself when no row asks for either."""
    if not any(s.params.logit_bias or s.banned for s in specs):
        return logits_NV
    shaped_NV = logits_NV.clone()
    for row_V, spec in zip(shaped_NV, specs, strict=True):
        if spec.params.logit_bias:
            ids = torch.tensor(list(spec.params.logit_bias), device=row_V.device)
            row_V[ids] += torch.tensor(list(spec.params.logit_bias.values()), dtype=row_V.dtype, device=row_V.device)
        if spec.banned:
            banned = [i for i in spec.banned if i < len(row_V)]  # a stop id beyond the vocabulary is never sampled
            row_V[torch.tensor(banned, dtype=torch.int64, device=row_V.device)] = -math.inf
    return shaped_NV


def _draw(logits_V: LogitsRow, spec: SampleSpec) -> int:
    """Inverse-CDF sampling among the candidates, in order of their ids, with one uniform number, in float64."""
    params = spec.params
    with np.errstate(over="ignore"):  # a tiny temperature leaves the best candidates only: exp(-inf) is 0
        weights_V = np.exp((logits_V.astype(np.float64) - logits_V.max()) / params.temperature)
    ids = _candidates(logits_V, weights_V, params)
    cumulative = np.cumsum(weights_V if ids is None else weights_V[ids])
    target = uniform(params.seed, spec.choice, spec.position) * cumulative[-1]
    drawn = int(np.searchsorted(cumulative, target, side="right"))
    return drawn if ids is None else int(ids[drawn])


def _candidates(logits_V: LogitsRow, weights_V: Weights, params: SamplingParams) -> TokenIds | None:
    """The ids that top-k, then top-p (of the mass that top-k left), then min-p leave, ascending; None for all of them.

    At equal logits the lower id survives.
    """
    if not params.top_k and params.top_p >= 1:
        return np.flatnonzero(weights_V >= params.min_p) if params.min_p > 0 else None
    if params.top_p >= 1:
        ids = best_first(logits_V, params.top_k)
    else:
        ids = _nucleus(logits_V, weights_V, params)
    return np.sort(ids[weights_V[ids] >= params.min_p])


def _nucleus(logits_V: LogitsRow, weights_V: Weights, params: SamplingParams) -> TokenIds:
    """The fewest best ids whose mass reaches `top_p`, best first."""
    ids = best_first(logits_V, params.top_k or NUCLEUS_HEAD)
    if params.top_k:
        mass = params.top_p * weights_V[ids].sum()
    else:
        mass = params.top_p * weights_V.sum()
        while weights_V[ids].sum() < mass and len(ids) < len(logits_V):
            ids = best_first(logits_V, 16 * len(ids))
    return ids[: int(np.searchsorted(np.cumsum(weights_V[ids]), mass, side="left")) + 1]


def uniform(seed: int, choice: int, position: int) -> float:
    """A float64 in [0, 1), on the 2**-53 grid.

    Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by seed and choice and
    counted by position: no state, so any worker can go on where another stopped.
    """
    key = (seed % 2**64) | (choice << 64)
    raw = int(np.random.Philox(key=key, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def _logprobs(logits_NV: torch.Tensor, specs: Sequence[SampleSpec]) -> dict[int, LogitsRow]:
    """fp32 log-softmax of the raw logits, for the rows that ask for logprobs."""
    rows = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    if not rows:
        return {}
    logprobs_MV = torch.log_softmax(logits_NV[rows].float(), dim=-1).cpu().numpy()
    return dict(zip(rows, logprobs_MV, strict=True))


def _describe(token_id: int, spec: SampleSpec, logprobs_V: LogitsRow | None) -> SampledToken:
    if logprobs_V is None:
        return SampledToken(token_id, weight_version=spec.weight_version)
    top = best_first(logprobs_V, spec.params.logprobs) if spec.params.logprobs else ()
    return SampledToken(
        token_id=token_id,
        logprob=_token_logprob(token_id, logprobs_V),
        top=tuple(_token_logprob(int(i), logprobs_V) for i in top),
        weight_version=spec.weight_version,
    )


def _token_logprob(token_id: int, logprobs_V: LogitsRow) -> TokenLogprob:
    """Equally likely ids share the best of their ranks: one more than the number of ids that are more likely."""
    logprob = logprobs_V[token_id]
    return TokenLogprob(token_id, float(logprob), 1 + int(np.count_nonzero(logprobs_V > logprob)))
