"""What makes ids more or less likely: logit bias, and penalties for what was there before. Formulas as in vLLM.

Shape suffix: V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.sampling import SamplingParams


def asks_for_penalty(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def penalize_row(logits_V: torch.Tensor, params: SamplingParams, token_ids: Sequence[int], num_prompt: int) -> None:
    """Adds the bias, then applies the penalties, in place; -inf stays -inf.

    Args:
        logits_V: fp32.
        token_ids: the prompt, `num_prompt` tokens, then what was generated.
    """
    if params.logit_bias:
        ids_B = torch.tensor(list(params.logit_bias), device=logits_V.device)
        logits_V[ids_B] += torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype, device=logits_V.device)
    if params.repetition_penalty != 1:
        _penalize_repetition(logits_V, params.repetition_penalty, token_ids)
    if (params.frequency_penalty != 0 or params.presence_penalty != 0) and len(token_ids) > num_prompt:
        ids, counts = np.unique(np.asarray(token_ids[num_prompt:], np.int64), return_counts=True)
        ids_G, counts_G = _like(ids, logits_V), _like(counts, logits_V).to(logits_V.dtype)
        # Two subtractions, not one of the sum: their roundings differ.
        logits_V[ids_G] -= counts_G * params.frequency_penalty
        logits_V[ids_G] -= params.presence_penalty


def _penalize_repetition(logits_V: torch.Tensor, penalty: float, token_ids: Sequence[int]) -> None:
    """CTRL's penalty (Keskar et al., arXiv 1909.05858), with negative logits multiplied."""
    ids_S = _like(np.unique(np.asarray(token_ids, np.int64)), logits_V)
    seen_S = logits_V[ids_S]
    # A tensor of divisors, because some devices multiply by the reciprocal of a single one.
    penalty_S = torch.full_like(seen_S, penalty)
    # A tiny penalty must not make a logit infinite: softmax would have no answer.
    raised_S = (seen_S / penalty_S).clamp_(max=torch.finfo(seen_S.dtype).max)
    logits_V[ids_S] = torch.where(seen_S > 0, raised_S, seen_S * penalty_S)


def _like(ids: npt.NDArray[np.int64], logits_V: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids).to(logits_V.device)
