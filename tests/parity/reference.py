"""transformers' answer to the same tokens: logits, and each router's choice and probabilities.

Shape suffixes: T tokens, V vocabulary, L layers, K experts per token, E experts.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

#: A choice that the reference itself made by less than this may fall the other way.
TIE_GAP = 1e-4


@dataclass(frozen=True, slots=True)
class Reference:
    logits_TV: torch.Tensor
    #: Probabilities of all experts, by MoE layer.
    scores_TE: dict[int, npt.NDArray[np.float32]]
    #: The chosen experts, by MoE layer.
    ids_TK: dict[int, npt.NDArray[np.int64]]

    def gap(self, layer: int, token: int) -> float:
        """By how much the last expert that was chosen beat the first one that was not."""
        top_k = self.ids_TK[layer].shape[1]
        scores = np.sort(self.scores_TE[layer][token])[::-1]
        return float(scores[top_k - 1] - scores[top_k]) if top_k < len(scores) else 1.0


@torch.inference_mode()
def run_reference(path: Path, tokens: list[int]) -> Reference:
    """One fp32 forward pass of the checkpoint over all tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    scores: dict[int, npt.NDArray[np.float32]] = {}
    ids: dict[int, npt.NDArray[np.int64]] = {}

    def tap(layer: int, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        logits, _, chosen = output
        scores[layer] = torch.softmax(logits.float(), dim=-1).numpy()
        ids[layer] = chosen.numpy()

    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):
            layer = int(re.findall(r"layers\.(\d+)\.", name)[0])
            module.register_forward_hook(lambda _module, _args, output, layer=layer: tap(layer, output))
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return Reference(logits, scores, ids)


def differing_rows(rows_TLK: npt.NDArray[np.generic], reference: Reference) -> list[tuple[int, int]]:
    """(token, layer) of every choice that differs from the reference's and counts.

    Choices are compared as sets, in the order in which they are computed. A difference does not count where the
    reference's own choice was a tie; what follows such a point comes from other values, so it is not compared.
    """
    layers = sorted(reference.ids_TK)
    for token in range(len(rows_TLK)):
        for layer in layers:
            if set(rows_TLK[token, layer].tolist()) != set(reference.ids_TK[layer][token].tolist()):
                return [] if reference.gap(layer, token) <= TIE_GAP else [(token, layer)]
    return []
