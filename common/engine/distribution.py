"""From shaped logits to a drawn id: temperature, top-k, top-p, min-p, and one counter-based random number.

In NumPy and float64, on one thread: a row never depends on its neighbours or on the machine's thread count.

Shape suffixes: V vocabulary, C candidates.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.model.scores import LogitsRow, TokenIds, best_first
from common.sampling import SamplingParams

Weights = npt.NDArray[np.float64]

#: Candidates that are sorted first when a nucleus is looked for; nearly always they are enough.
NUCLEUS_HEAD = 1024


@dataclass(frozen=True, slots=True)
class Distribution:
    """What one row is sampled from."""

    logits_V: LogitsRow
    #: Logits over temperature, the largest being 0.
    scaled_V: Weights
    #: Their exponentials.
    weights_V: Weights
    #: Candidates, ascending; None for the whole vocabulary.
    ids_C: TokenIds | None

    @classmethod
    def of(cls, logits_V: LogitsRow, params: SamplingParams) -> "Distribution":
        """The distribution after temperature and filters; with temperature 0 the plain softmax of the logits.

        Args:
            logits_V: at least one is finite; forbidden ids are at -inf.
        """
        temperature = params.temperature or 1.0
        # A tiny temperature leaves the best candidates only: exp(-inf) is 0.
        with np.errstate(over="ignore"):
            scaled_V = (logits_V.astype(np.float64) - logits_V.max()) / temperature
        weights_V = np.exp(scaled_V)
        ids_C = None if params.temperature == 0 else _candidates(logits_V, weights_V, params)
        return cls(logits_V, scaled_V, weights_V, ids_C)

    def draw(self, number: float) -> int:
        """The id at `number`, in [0, 1), of the cumulative distribution of the candidates in order of their ids."""
        cumulative_C = np.cumsum(self.weights_V if self.ids_C is None else self.weights_V[self.ids_C])
        drawn = int(np.searchsorted(cumulative_C, number * cumulative_C[-1], side="right"))
        return drawn if self.ids_C is None else int(self.ids_C[drawn])

    def survivors(self) -> TokenIds:
        """The candidates that are not forbidden, ascending, however small their probability."""
        ids_C = np.arange(len(self.logits_V)) if self.ids_C is None else self.ids_C
        return ids_C[self.logits_V[ids_C] > -np.inf]

    def logprobs(self) -> LogitsRow:
        """fp32 [V], -inf for ids that cannot be drawn."""
        if self.ids_C is None:
            logprobs_V = self.scaled_V - np.log(self.weights_V.sum())
        else:
            logprobs_V = np.full_like(self.scaled_V, -np.inf)
            logprobs_V[self.ids_C] = self.scaled_V[self.ids_C] - np.log(self.weights_V[self.ids_C].sum())
        with np.errstate(over="ignore"):
            rounded_V: LogitsRow = logprobs_V.astype(np.float32)
        return rounded_V


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

    The same numbers as those of `numpy.random.Philox`, which counts up before each block. Making one of those for every
    token takes ten times as long: it asks the system for a seed that is not used.
    """
    return (_philox(seed & _WORD, choice & _WORD, position + 1) >> 11) * 2.0**-53


_WORD = 2**64 - 1


def _philox(key0: int, key1: int, counter: int) -> int:
    """The first of the four words of one block; the counter's three upper words are 0."""
    word0, word1, word2, word3 = counter, 0, 0, 0
    for _ in range(10):
        product0, product1 = word0 * 0xD2E7470EE14C6C93, word2 * 0xCA5A826395121157
        word0, word1 = (product1 >> 64) ^ word1 ^ key0, product1 & _WORD
        word2, word3 = (product0 >> 64) ^ word3 ^ key1, product0 & _WORD
        key0, key1 = (key0 + 0x9E3779B97F4A7C15) & _WORD, (key1 + 0xBB67AE8584CAA73B) & _WORD
    return word0
