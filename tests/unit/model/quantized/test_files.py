"""A quantised checkpoint looks like a plain one, and what is wrong with it is found and named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from common.errors import CheckpointError
from common.model.checkpoint import CheckpointTensors
from common.model.quantized.config import MXFP4, Quantization, block_fp8
from common.model.quantized.files import open_checkpoint

_FP8 = block_fp8(2, 3)
_PROJ = "model.layers.0.self_attn.q_proj.weight"
_SCALE = f"{_PROJ}_scale_inv"
_NORM = "model.norm.weight"
_GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"

Tensors = dict[str, torch.Tensor]


def _fp8_tensors() -> Tensors:
    weight = torch.tensor([[1.0, 2, 4, 0.5], [-1, 8, 16, 3], [448, 1, 0, -0.25]])
    return {
        _PROJ: weight.to(torch.float8_e4m3fn),
        _SCALE: torch.tensor([[0.5, 2.0], [0.25, 8.0]]),
        _NORM: torch.tensor([1.0, 3.0]).bfloat16(),
    }


#: By hand: the last row and the last column are in blocks of their own.
_FP8_VALUES = [[0.5, 1, 2, 1], [-0.5, 4, 8, 6], [112, 0.25, 0, -2]]


def _mxfp4_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (3, 6, 2), dtype=torch.uint8, generator=generator)
    return {
        f"{_GATE_UP}_blocks": blocks,
        f"{_GATE_UP}_scales": scales,
        f"{_GATE_UP}_bias": torch.zeros(3, 6).bfloat16(),
    }


def _open(path: Path, tensors: Tensors, quantization: Quantization | None) -> CheckpointTensors:
    save_file(tensors, path / "model.safetensors")
    return open_checkpoint(path, quantization)


def test_fp8_weights_show_under_plain_names(tmp_path: Path) -> None:
    with _open(tmp_path, _fp8_tensors(), _FP8) as files:
        files.check({_PROJ: (3, 4), _NORM: (2,)}, optional=())
        assert _PROJ in files
        assert _SCALE not in files
        assert files.shape(_PROJ) == (3, 4)
        assert files.dtype(_PROJ) == "F32"
        assert files.read(_PROJ).tolist() == _FP8_VALUES
        assert files.num_bytes([_PROJ, _NORM]) == 3 * 4 * 4 + 2 * 2
        assert files.num_bytes([_NORM]) == 2 * 2


def test_weights_that_are_not_quantised_are_read_as_they_are(tmp_path: Path) -> None:
    with _open(tmp_path, _fp8_tensors(), _FP8) as files:
        assert files.read(_NORM).dtype == torch.bfloat16
        assert files.read(_NORM).tolist() == [1.0, 3.0]
        assert files.read_slice(_NORM, 1).item() == 3.0
        assert files.dtype(_NORM) == "BF16"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_may_hold_for_a_whole_weight(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = _fp8_tensors() | {_SCALE: torch.full(shape, 0.5)}
    with _open(tmp_path, tensors, Quantization("fp8", None)) as files:
        assert files.read(_PROJ).tolist() == [[0.5, 1, 2, 0.25], [-0.5, 4, 8, 1.5], [224, 0.5, 0, -0.125]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_may_be_stored_in_fewer_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = _fp8_tensors()
    with _open(tmp_path, tensors | {_SCALE: tensors[_SCALE].to(dtype)}, _FP8) as files:
        assert files.read(_PROJ).tolist() == _FP8_VALUES


def test_mxfp4_experts_show_as_the_unquantised_tensor(tmp_path: Path) -> None:
    tensors = _mxfp4_tensors()
    expected = convert_moe_packed_tensors(tensors[f"{_GATE_UP}_blocks"], tensors[f"{_GATE_UP}_scales"])
    with _open(tmp_path, tensors, MXFP4) as files:
        files.check({_GATE_UP: (3, 64, 6), f"{_GATE_UP}_bias": (3, 6)}, optional=())
        assert sorted(files.names()) == [_GATE_UP, f"{_GATE_UP}_bias"]
        assert files.dtype(_GATE_UP) == "BF16"
        assert torch.equal(files.read(_GATE_UP), expected)
        for expert in range(3):
            assert torch.equal(files.read_slice(_GATE_UP, expert), expected[expert])
        assert files.num_bytes(files.names()) == 2 * (3 * 64 * 6 + 3 * 6)


def test_an_expert_is_read_without_the_others(tmp_path: Path) -> None:
    tensors = _mxfp4_tensors()
    tensors[f"{_GATE_UP}_scales"][1, 5, 1] = 255
    with _open(tmp_path, tensors, MXFP4) as files:
        assert files.read_slice(_GATE_UP, 0).isfinite().all()
        assert files.read_slice(_GATE_UP, 2).isfinite().all()
        complaint = rf"{_GATE_UP}_scales holds 255 for expert 1.*largest.* 252"
        with pytest.raises(CheckpointError, match=complaint):
            files.read_slice(_GATE_UP, 1)
        with pytest.raises(CheckpointError, match=complaint):
            files.read(_GATE_UP)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_scales_that_leave_no_finite_weight_are_named(tmp_path: Path, value: float) -> None:
    tensors = _fp8_tensors()
    tensors[_SCALE][1, 0] = value
    with _open(tmp_path, tensors, _FP8) as files, pytest.raises(CheckpointError, match=rf"{_SCALE} holds .*not finite"):
        files.read(_PROJ)


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def _put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_drop(_SCALE), rf"{_PROJ} is stored as F8_E4M3, but {_SCALE} is missing"),
        (
            _rename(_SCALE, f"{_PROJ}_scale"),
            rf"{_PROJ} has its scales in {_PROJ}_scale, .*not supported.* {_SCALE}, as",
        ),
        (_drop(_PROJ), rf"{_SCALE} is there, but no {_PROJ} in F8_E4M3"),
        (_put(_PROJ, torch.zeros(3, 4)), rf"{_SCALE} is there, but no {_PROJ} in F8_E4M3"),
        (_put(_SCALE, torch.ones(1, 2)), r"\[3, 4\], blocks of \[2, 3\].*in shape \[2, 2\], but that has \[1, 2\]"),
        (_put(_SCALE, torch.tensor(1.0)), r"in shape \[2, 2\], but that has \[\]"),
        (_put(_SCALE, torch.ones(2, 2, dtype=torch.uint8)), rf"{_PROJ} has scales of type U8, .* F32, BF16, F8_E8M0"),
        (_put(_PROJ, torch.zeros(1, 3, 4).to(torch.float8_e4m3fn)), r"\[1, 3, 4\], but must have two dimensions"),
    ],
)
def test_fp8_weights_and_scales_must_fit(tmp_path: Path, change: Callable[[Tensors], object], complaint: str) -> None:
    tensors = _fp8_tensors()
    change(tensors)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        _open(tmp_path, tensors, _FP8)
    assert caught.value.message.startswith(f"{tmp_path}: ")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_drop(f"{_GATE_UP}_scales"), rf"{_GATE_UP}_blocks is there, but {_GATE_UP}_scales is missing"),
        (_drop(f"{_GATE_UP}_blocks"), rf"{_GATE_UP}_scales is there, but {_GATE_UP}_blocks is missing"),
        (_put(_GATE_UP, torch.zeros(3, 64, 6)), rf"{_GATE_UP} is there both plain and as {_GATE_UP}_blocks"),
        (
            _put(f"{_GATE_UP}_scales", torch.zeros(3, 6, 3, dtype=torch.uint8)),
            rf"{_GATE_UP}_scales has shape \[3, 6, 3\], but {_GATE_UP}_blocks needs \[3, 6, 2\]",
        ),
        (
            _put(f"{_GATE_UP}_blocks", torch.zeros(3, 6, 2, 8, dtype=torch.uint8)),
            rf"{_GATE_UP}_blocks has shape \[3, 6, 2, 8\], but must be \[experts, outputs, groups, 16\]",
        ),
        (_put(f"{_GATE_UP}_scales", torch.zeros(3, 6, 2)), rf"{_GATE_UP}_scales is stored as F32, but must be U8"),
    ],
)
def test_mxfp4_blocks_and_scales_must_fit(tmp_path: Path, change: Callable[[Tensors], object], complaint: str) -> None:
    tensors = _mxfp4_tensors()
    change(tensors)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        _open(tmp_path, tensors, MXFP4)
    assert caught.value.message.startswith(f"{tmp_path}: ")


def test_quantised_values_without_a_configuration_are_refused(tmp_path: Path) -> None:
    tensors = {_PROJ: _fp8_tensors()[_PROJ]}
    complaint = rf"{_PROJ} is stored as F8_E4M3.*quantization_config"
    with _open(tmp_path, tensors, None) as files, pytest.raises(CheckpointError, match=complaint):
        files.check({_PROJ: (3, 4)}, optional=())


def test_a_configuration_of_another_method_does_not_fit(tmp_path: Path) -> None:
    with _open(tmp_path, _fp8_tensors(), MXFP4) as files, pytest.raises(CheckpointError, match="unknown"):
        files.check({_PROJ: (3, 4), _NORM: (2,)}, optional=())


def test_a_wrong_shape_is_named_as_it_would_be_unquantised(tmp_path: Path) -> None:
    complaint = rf"{_GATE_UP} has shape \[3, 64, 6\].*asks for \[3, 32, 6\]"
    with _open(tmp_path, _mxfp4_tensors(), MXFP4) as files, pytest.raises(CheckpointError, match=complaint):
        files.check({_GATE_UP: (3, 32, 6), f"{_GATE_UP}_bias": (3, 6)}, optional=())


def test_a_slice_of_a_plain_file_equals_that_of_the_whole(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(2, 3, 4)
    with _open(tmp_path, {"experts": tensor}, None) as files:
        assert torch.equal(files.read_slice("experts", 1), tensor[1])
        assert files.dtype("experts") == "F32"
