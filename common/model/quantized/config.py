"""How a checkpoint's weights are quantised, as `quantization_config` in its config.json says. Imports no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from common.model.config_reader import ConfigReader

_KEY = "quantization_config"
#: transformers assumes it when `weight_block_size` is absent; DeepSeek and Qwen publish with it.
_DEFAULT_BLOCK = (128, 128)
#: Rows or columns that may share a scale; one scale for a whole weight is spelled as null.
_LARGEST_BLOCK = 65_536
_SUPPORTED = "'fp8' (weight blocks of float8_e4m3fn) or 'mxfp4'; convert the checkpoint to bfloat16 first"


@dataclass(frozen=True, slots=True)
class Quantization:
    """A kind of quantised weights that is read by dequantising it."""

    kind: Literal["fp8", "mxfp4"]
    #: fp8: rows and columns of a weight that share a scale; None is one scale for the whole weight.
    #: mxfp4: always (1, 32), along the input dimension.
    block: tuple[int, int] | None

    def to_json(self) -> dict[str, Any]:
        """The value of `quantization_config` that `read_quantization` reads as this."""
        if self.kind == "mxfp4":
            return {"quant_method": "mxfp4"}
        block = None if self.block is None else list(self.block)
        return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block, "activation_scheme": "dynamic"}


MXFP4 = Quantization("mxfp4", (1, 32))


def block_fp8(rows: int = 128, columns: int = 128) -> Quantization:
    return Quantization("fp8", (rows, columns))


def read_quantization(reader: ConfigReader, *, fused_experts: bool) -> Quantization | None:
    """What config.json says; None if the weights are not quantised.

    Which weights are quantised is not read here (`modules_to_not_convert`, `ignored_layers`): the type that a tensor
    is stored in shows it.

    Args:
        fused_experts: whether the family has the weights of all experts in one tensor, as MXFP4 needs.

    Raises:
        CheckpointError: a method or variant of it that is not supported, or not in this family; or a wrong value.
    """
    if reader.raw("compression_config") is not None:
        reader.fail("compression_config", reader.raw("compression_config"), "absent; convert the checkpoint first")
    if reader.raw(_KEY) is None:
        return None
    section = reader.section(_KEY)
    method = section.text("quant_method")
    if method not in ("fp8", "mxfp4"):
        section.fail("quant_method", method, _SUPPORTED)
    if method == "mxfp4" and not fused_experts:
        wanted = "'fp8' in a family whose experts have their own tensors each; convert the checkpoint to bfloat16 first"
        section.fail("quant_method", method, wanted)
    if method == "mxfp4":
        return MXFP4
    return Quantization("fp8", _read_fp8_block(section))


def _read_fp8_block(section: ConfigReader) -> tuple[int, int] | None:
    _require(section, "fmt", "e4m3")
    # Static means that activations are quantised with scales of the checkpoint, which nothing here computes.
    _require(section, "activation_scheme", "dynamic")
    _require(section, "expert_dtype", "fp8")
    # Both kinds of scales are read by the type that they are stored in.
    _require(section, "scale_fmt", "float", "ue8m0")
    return None if section.is_null("weight_block_size") else _read_block(section)


def _require(section: ConfigReader, name: str, *allowed: str) -> None:
    """Refuses any value but these; an absent key means the first of them."""
    value = section.raw(name)
    if value is not None and value not in allowed:
        section.fail(name, value, " or ".join(repr(item) for item in allowed))


def _read_block(section: ConfigReader) -> tuple[int, int]:
    value = section.raw("weight_block_size")
    if value is None:
        return _DEFAULT_BLOCK
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        section.fail("weight_block_size", value, "two positive integers, [rows, columns], or null for one scale each")
    if max(value) > _LARGEST_BLOCK:
        wanted = f"at most {_LARGEST_BLOCK} rows and columns, or null for one scale for each weight"
        section.fail("weight_block_size", value, wanted)
    return value[0], value[1]
