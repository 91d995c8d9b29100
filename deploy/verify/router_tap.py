"""What the routers of a transformers model choose, and by how little: read off the router modules themselves.

Every router module of transformers 5 returns (logits, weights, expert ids), whatever its family computes in between.

Shape suffixes: T tokens, M MoE layers, K experts per token, E experts, J groups of experts.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch

from common.errors import ConfigError
from common.model.config import ModelConfig, RouterConfig

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of every router in one forward pass of one sequence."""

    ids_TMK: torch.Tensor
    #: fp32: by how much the last expert that was chosen beat the first one that was not, or a group of experts that
    #: was kept the first one that was not, whichever is less; infinite where there was nothing to choose.
    gaps_TM: torch.Tensor


class RouterTap:
    """Listens to the routers of one model."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        """Raises ConfigError unless `model` has a router in exactly the MoE layers of `config`."""
        self._config = config
        self._heard: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        routers = _find_routers(model)
        if routers.keys() != config.moe_layers:
            raise ConfigError(
                f"transformers' {config.family} model has router modules in layers {sorted(routers)}, but the "
                f"MoE layers are {sorted(config.moe_layers)}; transformers 5 is needed: pip install 'transformers>=5'"
            )
        for layer, router in routers.items():
            router.register_forward_hook(lambda module, _inputs, output, layer=layer: self._hear(layer, module, output))

    def take(self) -> Choices:
        """The choices of the last forward pass. Forgets them."""
        heard = [self._heard.pop(layer) for layer in sorted(self._config.moe_layers)]
        return Choices(torch.stack([ids for ids, _ in heard], dim=1), torch.stack([gaps for _, gaps in heard], dim=1))

    def _hear(self, layer: int, router: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        logits_TE, _, ids_TK = output
        correction_E = getattr(router, "e_score_correction_bias", None)
        self._heard[layer] = ids_TK, choice_gaps(logits_TE.float(), self._config.router, ids_TK.shape[1], correction_E)


def _find_routers(model: Any) -> dict[int, Any]:
    """Router modules by layer; transformers spells their class ...TopKRouter or ...TopkRouter."""
    routers = {}
    for name, module in model.named_modules():
        found = _LAYER.search(name)
        if found and type(module).__name__.lower().endswith("topkrouter"):
            routers[int(found[1])] = module
    return routers


def choice_gaps(
    logits_TE: torch.Tensor, config: RouterConfig, top_k: int, correction_E: torch.Tensor | None = None
) -> torch.Tensor:
    """`Choices.gaps_TM` of one layer, [T], from its fp32 logits: differences of what the family ranks by."""
    ranking_TE = _ranking(logits_TE, config)
    if correction_E is not None:
        ranking_TE = ranking_TE + correction_E.float()
    if config.num_groups_kept == config.num_groups:
        return _boundary_gaps(ranking_TE, top_k)
    grouped_TJE = ranking_TE.view(len(ranking_TE), config.num_groups, -1)
    scores_TJ = grouped_TJE.topk(config.num_group_scores, dim=2).values.sum(dim=2)
    kept_TJ = scores_TJ.topk(config.num_groups_kept, dim=1).indices
    dropped_TJ = torch.ones_like(scores_TJ, dtype=torch.bool).scatter(1, kept_TJ, False)
    within_TE = grouped_TJE.masked_fill(dropped_TJ.unsqueeze(2), float("-inf")).flatten(1)
    return torch.minimum(_boundary_gaps(scores_TJ, config.num_groups_kept), _boundary_gaps(within_TE, top_k))


def _ranking(logits_TE: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    match config.scoring:
        case "softmax":
            return logits_TE.softmax(dim=1)
        case "sigmoid":
            return logits_TE.sigmoid()
        case "chosen_softmax":
            return logits_TE


def _boundary_gaps(scores_TX: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Between the last chosen and the first other of X candidates, [T]."""
    if num_chosen == scores_TX.shape[1]:
        return torch.full((len(scores_TX),), float("inf"))
    best_TX = scores_TX.sort(dim=1, descending=True).values
    return best_TX[:, num_chosen - 1] - best_TX[:, num_chosen]
