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

from common.errors import InternalError, InvalidRequestError, MoerelayError
from common.sampling import SampledToken, SamplingParams, TokenLogprob

LogitsRow = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How one row is sampled. `position` is the absolute position of the token to be sampled."""

    params: SamplingParams
    position: int
    #: Ids that must not be sampled now.
    banned: frozenset[int]

    @classmethod
    def of(
        cls, params: SamplingParams, eos_token_ids: frozenset[int], *, num_prompt: int, num_generated: int
    ) -> "SampleSpec":
        """The spec of the token after `num_generated` tokens.

        As in vLLM, the first `min_tokens` tokens are neither stop ids nor end-of-sequence ids, `ignore_eos` or not.
        """
        early = num_generated < params.min_tokens
        return cls(
            params=params,
            position=num_prompt + num_generated,
            banned=params.stop_token_ids | eos_token_ids if early else frozenset(),
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
    finite = torch.isfinite(logits_NV).all(dim=1).tolist()
    shaped_NV = _shaped(logits_NV, specs)
    best_N, greedy_N = (t.tolist() for t in shaped_NV.max(dim=1))  # the first of equal maxima: the lowest id
    logprobs_NV = _logprobs(logits_NV, specs)
    results: list[SampledToken | MoerelayError] = []
    for row, spec in enumerate(specs):
        if not finite[row]:
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
    """Inverse-CDF sampling among the candidates, best first, with one uniform number.

    The order of the filters is temperature, top-k, top-p, min-p; top-p measures mass among what top-k left. All sums
    run in float64 from the best candidate down, so their order is fixed.
    """
    params = spec.params
    ids = best_first(logits_V, params.top_k or len(logits_V))
    scaled = logits_V[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature leaves the best candidate only: exp(-inf) is 0
        weights = np.exp((scaled - scaled[0]) / params.temperature)
    cumulative = np.cumsum(weights)
    keep = len(ids)
    if params.top_p < 1:
        keep = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
    if params.min_p > 0:
        keep = min(keep, int(np.count_nonzero(weights >= params.min_p)))
    target = uniform(params.seed, params.choice, spec.position) * cumulative[keep - 1]
    return int(ids[np.searchsorted(cumulative[:keep], target, side="right")])


def uniform(seed: int, choice: int, position: int) -> float:
    """A float64 in [0, 1) on the 2**-53 grid: Philox4x64-10 (Salmon et al., SC 2011) keyed by seed and choice, counted
    by position."""
    key = (seed % 2**64) | (choice << 64)
    raw = int(np.random.Philox(key=key, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def best_first(values_V: LogitsRow, count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest values, by (value descending, id ascending). No NaN.

    Value and id are packed into one integer, so that keys are unique and any sorting algorithm gives the same order.
    """
    bits = (values_V + np.float32(0)).view(np.uint32)  # + 0 turns -0 into +0: equal values, equal bits
    # IEEE floats order like integers once negatives are mirrored; inverted, so that the smallest key is the best.
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(2**31))
    keys = (~ascending).astype(np.uint64) << np.uint64(32) | np.arange(len(values_V), dtype=np.uint64)
    if count < len(keys):
        keys = np.partition(keys, count - 1)[:count]
    keys.sort()
    return (keys & np.uint64(2**32 - 1)).astype(np.int64)


def _logprobs(logits_NV: torch.Tensor, specs: Sequence[SampleSpec]) -> dict[int, LogitsRow]:
    """fp32 log-softmax of the raw logits, for the rows that ask for logprobs."""
    rows = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    if not rows:
        return {}
    logprobs_MV = torch.log_softmax(logits_NV[rows].float(), dim=-1).cpu().numpy()
    return dict(zip(rows, logprobs_MV, strict=True))


def _describe(token_id: int, spec: SampleSpec, logprobs_V: LogitsRow | None) -> SampledToken:
    if logprobs_V is None:
        return SampledToken(token_id)
    top = best_first(logprobs_V, spec.params.logprobs) if spec.params.logprobs else ()
    return SampledToken(
        token_id=token_id,
        logprob=_token_logprob(token_id, logprobs_V),
        top=tuple(_token_logprob(int(i), logprobs_V) for i in top),
    )


def _token_logprob(token_id: int, logprobs_V: LogitsRow) -> TokenLogprob:
    """Equally likely ids share the best of their ranks: one more than the number of ids that are more likely."""
    logprob = logprobs_V[token_id]
    return TokenLogprob(token_id, float(logprob), 1 + int(np.count_nonzero(logprobs_V > logprob)))
