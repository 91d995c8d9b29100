"""Block-wise FP8: a weight in float8_e4m3fn and one scale for each block of it, as DeepSeek-V3 is published.

`X.weight` comes with `X.weight_scale_inv`, by which the stored values are multiplied; the name says that it is the
inverse of what the weights were multiplied by. Blocks at the lower and right edge may be cut off.

Shape suffixes: O rows (output), I columns (input), R rows of blocks, C columns of blocks.
"""

import torch
from torch.nn.functional import pad

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max

Block = tuple[int, int]


def scale_shape(weight_shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """R and C: the number of blocks that an [O, I] weight has."""
    num_rows, num_columns = weight_shape
    return -(-num_rows // block[0]), -(-num_columns // block[1])


def dequantize_block_fp8(weight_OI: torch.Tensor, scale_inv_RC: torch.Tensor, block: Block) -> torch.Tensor:
    """Float32 [O, I]: each value times the scale of its block; exact but for one rounding."""
    out_OI = torch.empty(weight_OI.shape, dtype=torch.float32)
    block = _no_larger(block, weight_OI)
    scale_RI = scale_inv_RC.float().repeat_interleave(block[1], dim=1)[:, : weight_OI.shape[1]]
    # A row of blocks at a time, so that there is no second copy in float32.
    rows = torch.split(weight_OI, block[0])
    for weight, scale_I, out in zip(rows, scale_RI, torch.split(out_OI, block[0]), strict=True):
        torch.mul(weight.float(), scale_I, out=out)
    return out_OI


def quantize_block_fp8(weight_OI: torch.Tensor, block: Block = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises so that the largest magnitude of a block becomes the largest FP8 value.

    Returns:
        float8_e4m3fn [O, I] and the float32 scales [R, C]; a block of zeros has scale 1.
    """
    block = _no_larger(block, weight_OI)
    num_rows, num_columns = scale_shape(tuple(weight_OI.shape), block)
    missing = (num_columns * block[1] - weight_OI.shape[1], num_rows * block[0] - weight_OI.shape[0])
    padded = pad(weight_OI.float(), (0, missing[0], 0, missing[1]))
    blocks = padded.view(num_rows, block[0], num_columns, block[1])
    peak_RC = blocks.abs().amax(dim=(1, 3))
    # A subnormal scale would be too coarse to divide by.
    smallest = torch.finfo(torch.float32).tiny
    scale_inv_RC = torch.where(peak_RC > 0, (peak_RC / FP8_MAX).clamp(min=smallest), 1.0)
    scaled = (blocks / scale_inv_RC[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).view(padded.shape)
    return scaled[: weight_OI.shape[0], : weight_OI.shape[1]].to(torch.float8_e4m3fn).contiguous(), scale_inv_RC


def _no_larger(block: Block, weight_OI: torch.Tensor) -> Block:
    """The block without what hangs over a weight that is smaller, so that nothing is computed for that."""
    num_rows, num_columns = weight_OI.shape
    return min(block[0], max(num_rows, 1)), min(block[1], max(num_columns, 1))
