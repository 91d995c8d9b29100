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

    def gap(self, layer: int, token: int) -> float:
        """By how much the last expert that was chosen beat the first one that was not."""
        return float(self.choices.gaps_TM[token, self.moe_layers.index(layer)])

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


def first_difference(rows_TLK: npt.NDArray[np.generic], reference: Reference) -> tuple[int, int] | None:
    """(token, layer) of the first choice, in the order of computation, that is not the reference's as a set."""
    unequal_TM = reference.unequal_sets(rows_TLK)
    if not unequal_TM.any():
        return None
    token, column = (int(index) for index in np.argwhere(unequal_TM)[0])
    return token, reference.moe_layers[column]


def differing_rows(rows_TLK: npt.NDArray[np.generic], reference: Reference) -> list[tuple[int, int]]:
    """(token, layer) of every choice that differs from the reference's and counts.

    Choices are compared as sets, in the order in which they are computed. A difference does not count where the
    reference's own choice was a tie; what follows such a point comes from other values, so it is not compared.
    """
    found = first_difference(rows_TLK, reference)
    if found is None or reference.gap(found[1], found[0]) <= TIE:
        return []
    return [found]
