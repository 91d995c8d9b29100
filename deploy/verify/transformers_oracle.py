"""The second oracle of `moerelay verify`: expert choices of transformers' fp32 model, compared as sets.

Shape suffixes: T positions, M MoE layers, L layers, K experts per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub.errors import StrictDataclassError

from common.errors import ConfigError
from common.model.config import ModelConfig
from common.model.families import FAMILIES
from common.model.quantized.files import open_checkpoint
from common.routing.record import RoutingArray
from deploy.verify.findings import Difference
from deploy.verify.router_tap import Choices, RouterTap

#: A choice counts as a tie when the reference's scores on both sides of the boundary are closer than this.
TIE = 1e-4

#: What transformers raises for checkpoints that it does not like, or for packages that it lacks.
_FOREIGN_ERRORS = (ImportError, OSError, RuntimeError, TypeError, ValueError, LookupError, StrictDataclassError)


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
        """Weights of a quantised checkpoint are dequantised here, because transformers needs a GPU or more for that.

        Raises:
            ConfigError: transformers is not installed, or too old, or cannot load this, or does not use every tensor.
            CheckpointError: quantised weights are not what the checkpoint's config.json says.
        """
        try:
            transformers: Any = import_module("transformers")
        except ModuleNotFoundError:
            raise ConfigError("--oracle transformers needs transformers: pip install transformers") from None
        transformers.utils.logging.disable_progress_bar()  # it writes to files too
        settings = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
        load = _load_plain if config.quantization is None else _load_dequantized
        try:
            model, report = load(transformers, path, config, settings)
        except _FOREIGN_ERRORS as error:
            raise ConfigError(f"transformers cannot load {path}: {error}") from error
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


def _load_plain(transformers: Any, path: Path, config: ModelConfig, settings: Mapping[str, Any]) -> Any:
    """The model, and what was missing or left over."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **settings)


def _load_dequantized(transformers: Any, path: Path, config: ModelConfig, settings: Mapping[str, Any]) -> Any:
    """As `_load_plain`, of the same weights as if they had not been quantised."""
    hf_config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    del hf_config.quantization_config
    model_class = getattr(transformers, FAMILIES[config.family].architecture)
    with open_checkpoint(path, config.quantization) as files:
        names = [name for name in files.names() if not name.startswith(_extra_layers(config))]
        tensors = {name: files.read(name) for name in names}
        return model_class.from_pretrained(None, config=hf_config, state_dict=tensors, **settings)


def _extra_layers(config: ModelConfig) -> tuple[str, ...]:
    """Beginnings of the names of tensors that nothing here reads."""
    return tuple(f"model.layers.{config.num_layers + index}." for index in range(config.num_extra_layers))


def _check_loading(report: dict[str, Any], config: ModelConfig) -> None:
    """A model that guesses weights, or leaves some out, is no oracle."""
    unexpected = [name for name in report["unexpected_keys"] if not name.startswith(_extra_layers(config))]
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
