"""Log probabilities of given tokens, and of the most likely ones, from logits.

Shape suffixes: N rows, V vocabulary, K alternatives.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.prompt_logprobs import PromptLogprobs, empty

LogitsRow = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]


def score(logits_NV: torch.Tensor, targets: Sequence[int], num_top: int) -> PromptLogprobs:
    """The fp32 log-softmax at each row's target, and at its `num_top` most likely ids, best first.

    A rank is one more than the number of ids that are more likely. Of equally likely ids the lower comes first. Where
    the logits are not finite, log probabilities may be NaN.

    Args:
        logits_NV: raw, fp32, one row per target.

        num_top: at most V.

    Returns:
        [N, 1 + num_top]
    """
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    targets_N = torch.tensor(targets, dtype=torch.int64, device=logits_NV.device)[:, None]
    own_N = logprobs_NV.gather(1, targets_N)
    top_NK = top_ids(logprobs_NV, num_top)
    best_NK = logprobs_NV.gather(1, torch.from_numpy(top_NK).to(logits_NV.device))
    entries = empty(len(targets), num_top)
    entries["token_id"][:, 0], entries["token_id"][:, 1:] = targets, top_NK
    entries["logprob"] = torch.cat([own_N, best_NK], dim=1).cpu().numpy()
    entries["rank"][:, 0] = 1 + (logprobs_NV > own_N).sum(dim=1).cpu().numpy()
    # Whatever is more likely than one of the best is one of the best itself.
    entries["rank"][:, 1:] = 1 + (best_NK[:, None, :] > best_NK[:, :, None]).sum(dim=2).cpu().numpy()
    return entries


def top_ids(values_NV: torch.Tensor, count: int) -> TokenIds:
    """Per row the ids of the `count` largest values, by (value descending, id ascending), [N, count].

    The library's top-k leaves open which of equal values it takes, so that rows with a tie at the boundary, which are
    few, are ranked one by one.
    """
    if not count:
        return np.empty((len(values_NV), 0), np.int64)
    best_NK, ids_NK = values_NV.topk(count, dim=1)
    num_candidates_N = (values_NV >= best_NK[:, -1:]).sum(dim=1).cpu().numpy()
    order_NK = np.lexsort((ids_NK.cpu().numpy(), -best_NK.cpu().numpy()), axis=1)
    ids: TokenIds = np.take_along_axis(ids_NK.cpu().numpy(), order_NK, axis=1)
    for row in np.flatnonzero(num_candidates_N != count):  # of NaN rows, too
        ids[row] = best_first(values_NV[row].nan_to_num(nan=-torch.inf).cpu().numpy(), count)
    return ids


def best_first(values_V: LogitsRow, count: int) -> TokenIds:
    """The ids of the `count` largest values, by (value descending, id ascending). No NaN."""
    if count >= len(values_V):
        return np.argsort(-values_V, kind="stable")
    threshold = np.partition(values_V, len(values_V) - count)[len(values_V) - count]
    ids = np.flatnonzero(values_V >= threshold)  # more than `count` when several equal the threshold
    return ids[np.argsort(-values_V[ids], kind="stable")][:count]
