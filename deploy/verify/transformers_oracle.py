"""The second oracle of `moerelay verify`: expert choices of transformers' fp32 model, compared as sets.

Shape suffixes: T positions, M MoE layers, L layers, K experts per token, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch

from common.errors import ConfigError
from common.routing.record import RoutingArray
from deploy.verify.findings import Difference

#: A choice counts as a tie when the reference's scores on both sides of the boundary are closer than this.
_TIE = 1e-4


@dataclass
class Agreement:
    """How many expert sets (one per position and MoE layer) were equal."""

    num_equal: int = 0
    num_sets: int = 0

    def __iadd__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.num_equal + other.num_equal, self.num_sets + other.num_sets)

    def __str__(self) -> str:
        percent = 100 * self.num_equal / max(1, self.num_sets)
        return f"{self.num_equal} of {self.num_sets} expert sets equal ({percent:.3f} %)"


class TransformersOracle:
    """transformers' own model of the same checkpoint, in fp32."""

    def __init__(self, model: Any, moe_layers: Sequence[int]) -> None:
        self._model = model
        self._moe_layers = list(moe_layers)

    @classmethod
    def load(cls, path: Path, moe_layers: Sequence[int]) -> Self:
        """Raises ConfigError if transformers is not installed."""
        try:
            transformers: Any = import_module("transformers")
        except ModuleNotFoundError:
            raise ConfigError("--oracle transformers needs transformers: pip install transformers") from None
        transformers.utils.logging.disable_progress_bar()  # it writes to files too
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        return cls(model.eval(), moe_layers)

    @torch.inference_mode()
    def scores_TME(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The routers' scores for every position of one sequence."""
        output = self._model(torch.tensor([token_ids]), output_router_logits=True, use_cache=False)
        return torch.stack([scores_TE.float() for scores_TE in output.router_logits], dim=1)

    def check(
        self, token_ids: Sequence[int], start: int, rows_TLK: RoutingArray
    ) -> tuple[Agreement, Difference | None]:
        """Compares rows of positions `start` and following; `token_ids` are all tokens that were forwarded."""
        scores_TME = self.scores_TME(token_ids)[start:]
        moe_rows_TMK = torch.from_numpy(rows_TLK[:, self._moe_layers].astype("int64"))
        return compare_sets(scores_TME, moe_rows_TMK, self._moe_layers, start)


def compare_sets(
    scores_TME: torch.Tensor, rows_TMK: torch.Tensor, moe_layers: Sequence[int], start: int
) -> tuple[Agreement, Difference | None]:
    """Only the first unequal set is judged, because everything after it has another past; a tie is no difference."""
    top_k = rows_TMK.shape[2]
    expected_TMK = scores_TME.topk(top_k, dim=2).indices
    equal_TM = (expected_TMK.sort(dim=2).values == rows_TMK.sort(dim=2).values).all(dim=2)
    agreement = Agreement(int(equal_TM.sum()), equal_TM.numel())
    if bool(equal_TM.all()):
        return agreement, None
    row, column = (int(i) for i in (~equal_TM).nonzero()[0])
    best_E = scores_TME[row, column].sort(descending=True).values
    gap = float(best_E[top_k - 1] - best_E[top_k]) if top_k < len(best_E) else 0.0
    if gap <= _TIE:
        return agreement, None
    got, expected = rows_TMK[row, column].tolist(), expected_TMK[row, column].tolist()
    where = f"position {start + row}, layer {moe_layers[column]}"
    return agreement, Difference("transformers", f"{where}: {got} instead of {expected}, gap {gap:.1e}")
