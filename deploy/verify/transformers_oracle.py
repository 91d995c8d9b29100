"""The second oracle of `moerelay verify`: expert choices of transformers' fp32 model, compared as sets.

Shape suffixes: T positions, M MoE layers, L layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch

from common.errors import ConfigError
from common.model.config import ModelConfig
from common.routing.record import RoutingArray
from deploy.verify.findings import Difference
from deploy.verify.router_tap import Choices, RouterTap

#: A choice counts as a tie when the reference's scores on both sides of the boundary are closer than this.
TIE = 1e-4


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
    """transformers' own model of the same checkpoint."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        self._model = model
        self._moe_layers = sorted(config.moe_layers)
        self._tap = RouterTap(model, config)

    @classmethod
    def load(cls, path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Self:
        """Raises ConfigError if transformers is not installed, or too old, or does not use every tensor."""
        try:
            transformers: Any = import_module("transformers")
        except ModuleNotFoundError:
            raise ConfigError("--oracle transformers needs transformers: pip install transformers") from None
        transformers.utils.logging.disable_progress_bar()  # it writes to files too
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", local_files_only=True, output_loading_info=True
        )
        _check_loading(report, config)
        return cls(model.eval(), config)

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, Choices]:
        """Logits [T, V] of every position of one sequence, and what the routers chose there."""
        output = self._model(torch.tensor([token_ids]), use_cache=False)
        return output.logits[0], self._tap.take()

    def check(
        self, token_ids: Sequence[int], start: int, rows_TLK: RoutingArray
    ) -> tuple[Agreement, Difference | None]:
        """Compares rows of positions `start` and following; `token_ids` are all tokens that were forwarded."""
        _, choices = self.forward(token_ids)
        moe_rows_TMK = torch.from_numpy(rows_TLK[:, self._moe_layers].astype("int64"))
        return compare_sets(
            Choices(choices.ids_TMK[start:], choices.gaps_TM[start:]), moe_rows_TMK, self._moe_layers, start
        )


def _check_loading(report: dict[str, Any], config: ModelConfig) -> None:
    """A model that guesses weights, or leaves some out, is no oracle."""
    extra = tuple(f"model.layers.{config.num_layers + index}." for index in range(config.num_extra_layers))
    unexpected = [name for name in report["unexpected_keys"] if not name.startswith(extra)]
    wrong = sorted([*report["missing_keys"], *unexpected, *map(str, report["mismatched_keys"])])
    if wrong:
        raise ConfigError(
            f"transformers' model of family {config.family} does not fit the checkpoint's tensors, so that it says "
            f"nothing about them: {', '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}"
        )


def compare_sets(
    expected: Choices, rows_TMK: torch.Tensor, moe_layers: Sequence[int], start: int
) -> tuple[Agreement, Difference | None]:
    """Only the first unequal set is judged, because everything after it has another past; a tie is no difference."""
    equal_TM = (expected.ids_TMK.sort(dim=2).values == rows_TMK.sort(dim=2).values).all(dim=2)
    agreement = Agreement(int(equal_TM.sum()), equal_TM.numel())
    if bool(equal_TM.all()):
        return agreement, None
    row, column = (int(i) for i in (~equal_TM).nonzero()[0])
    gap = float(expected.gaps_TM[row, column])
    if gap <= TIE:
        return agreement, None
    got, wanted = rows_TMK[row, column].tolist(), expected.ids_TMK[row, column].tolist()
    where = f"position {start + row}, layer {moe_layers[column]}"
    return agreement, Difference("transformers", f"{where}: {got} instead of {wanted}, gap {gap:.1e}")
