"""The rules that every answer must keep, whatever the load: how many rows there are, and what is in them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.model.families import parse_config
from common.routing.record import RoutingArray


class BrokenContractError(Exception):
    """An answer is not what the API promises."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """What is known of a model's rows; None: not known, and so not checked."""

    dtype: str | None = None
    num_layers: int | None = None
    top_k: int | None = None
    num_experts: int | None = None
    #: Layers with experts; the others hold zeros.
    moe_layers: tuple[int, ...] | None = None

    @classmethod
    def of_checkpoint(cls, path: Path) -> "RowRules":
        """Raises CheckpointError if there is no supported checkpoint."""
        config = parse_config(path)
        record = config.routing
        moe_layers = tuple(sorted(config.moe_layers))
        return cls(record.dtype.name, record.num_layers, record.top_k, record.num_experts, moe_layers)

    def check(self, rows_TLK: RoutingArray) -> None:
        """Raises BrokenContractError."""
        if self.dtype is not None and rows_TLK.dtype.name != self.dtype:
            raise BrokenContractError(f"rows of {rows_TLK.dtype} instead of {self.dtype}")
        expected = self.num_layers, self.top_k
        if any(e not in (None, size) for e, size in zip(expected, rows_TLK.shape[1:], strict=True)):
            raise BrokenContractError(f"rows of shape {rows_TLK.shape[1:]} instead of {expected}")
        if self.num_experts is not None and rows_TLK.size and int(rows_TLK.max()) >= self.num_experts:
            raise BrokenContractError(f"expert {int(rows_TLK.max())} of {self.num_experts}")
        if rows_TLK.size and int(rows_TLK.min()) < 0:
            raise BrokenContractError(f"expert {int(rows_TLK.min())}")
        self._check_distinct(rows_TLK)

    def _check_distinct(self, rows_TLK: RoutingArray) -> None:
        ordered = np.sort(rows_TLK, axis=2)
        repeated_TL = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
        if self.moe_layers is not None:
            repeated_TL = repeated_TL[:, list(self.moe_layers)]
        else:
            # Layers of zeros may be those without experts.
            repeated_TL &= rows_TLK.any(axis=2)
        if repeated_TL.any():
            row = int(np.argwhere(repeated_TL)[0][0])
            raise BrokenContractError(f"an expert twice in one layer of row {row}: {rows_TLK[row].tolist()}")
