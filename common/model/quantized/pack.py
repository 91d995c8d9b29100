"""Quantises the tensors of a checkpoint that is being written, the same ones that published checkpoints quantise."""

import torch

from common.model.quantized.block_fp8 import quantize_block_fp8
from common.model.quantized.config import Quantization
from common.model.quantized.mxfp4 import quantize_mxfp4

#: Routers and the gates of shared experts are small and decide much, so nobody quantises them.
_ROUTERS = ("gate.weight", "router.weight")
_FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def pack_tensor(name: str, tensor: torch.Tensor, quantization: Quantization | None) -> dict[str, torch.Tensor]:
    """What is stored for one tensor, by name: itself, or its quantised values and scales.

    FP8 takes the matrices inside layers except routers; MXFP4 takes fused experts, [E, I, O].

    Raises:
        ConfigError: the tensor's size does not go with the quantisation.
    """
    if quantization is None or not _is_quantized(name, tensor, quantization):
        return {name: tensor}
    if quantization.kind == "mxfp4":
        blocks, scales = quantize_mxfp4(tensor)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}
    weight, scale_inv = quantize_block_fp8(tensor, quantization.block or (tensor.shape[0], tensor.shape[1]))
    return {name: weight, f"{name}_scale_inv": scale_inv}


def _is_quantized(name: str, tensor: torch.Tensor, quantization: Quantization) -> bool:
    if quantization.kind == "mxfp4":
        return name.endswith(_FUSED_EXPERTS)
    return tensor.dim() == 2 and ".layers." in name and name.endswith(".weight") and not name.endswith(_ROUTERS)
