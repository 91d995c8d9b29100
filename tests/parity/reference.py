"""transformers' answer to the same tokens: logits, and each router's choice.

Shape suffixes: T tokens, V vocabulary, L layers, M MoE layers, K experts per token.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.model.families import parse_config
from deploy.verify.router_tap import Choices
from deploy.verify.transformers_oracle import TIE, TransformersOracle


@dataclass(frozen=True)
class Reference:
    """What one forward pass over a sequence gave."""

    logits_TV: torch.Tensor
    choices: Choices
    moe_layers: list[int]

    @cached_property
    def ids_TMK(self) -> npt.NDArray[np.int64]:
        """The chosen experts, in no order."""
        return self.choices.ids_TMK.numpy()

    def unequal_sets(self, rows_TLK: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
        """[T, M]: where the set of chosen experts is another one."""
        rows_TMK = np.sort(rows_TLK[:, self.moe_layers].astype(np.int64), axis=2)
        differs_TM: npt.NDArray[np.bool_] = (rows_TMK != np.sort(self.ids_TMK, axis=2)).any(axis=2)
        return differs_TM


def run_reference(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Reference:
    """One forward pass over all tokens, in a model that is known to have loaded every tensor."""
    config = parse_config(path)
    logits_TV, choices = TransformersOracle.load(path, config, dtype).forward(tokens)
    return Reference(logits_TV.float(), choices, sorted(config.moe_layers))


def first_tie(rows_TLK: npt.NDArray[np.generic], reference: Reference) -> int | None:
    """The token at which the two part over a tie: where the first set, in the order of computation, that is not the
    reference's was one that the reference itself barely chose. None if they never part, or over something else.
    """
    unequal_TM = reference.unequal_sets(rows_TLK)
    if not unequal_TM.any():
        return None
    token, column = (int(index) for index in np.argwhere(unequal_TM)[0])
    return token if reference.choices.gaps_TM[token, column] <= TIE else None


def differing_rows(rows_TLK: npt.NDArray[np.generic], reference: Reference) -> list[tuple[int, int]]:
    """(token, layer) of every choice that is not the reference's as a set.

    From a `first_tie` on nothing is compared, because it comes from other values.
    """
    unequal_TM = reference.unequal_sets(rows_TLK)[: first_tie(rows_TLK, reference)]
    return [(int(token), reference.moe_layers[column]) for token, column in np.argwhere(unequal_TM)]
