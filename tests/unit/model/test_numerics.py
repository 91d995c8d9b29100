"""Devices and dtypes by name, and the fingerprint that two workers compare."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from common.errors import ConfigError
from common.model.config import ModelConfig
from common.model.families import config_from_json
from common.model.kernels.choice import available_kernels
from common.model.kernels.interface import Kernels
from common.model.kernels.reference import TORCH
from common.model.numerics import is_exact, numerics_fingerprint, resolve_device, resolve_dtype
from common.model.presets import synthetic_config
from tests.unit.model.harness import CPU


def _config(dtype: str) -> ModelConfig:
    return config_from_json(synthetic_config("mixtral", "tiny", {"torch_dtype": dtype}), {}, source="config.json")


def test_dtype_auto_is_what_the_checkpoint_declares() -> None:
    assert resolve_dtype("auto", _config("bfloat16")) == torch.bfloat16
    assert resolve_dtype("auto", _config("float32")) == torch.float32
    assert resolve_dtype("float32", _config("bfloat16")) == torch.float32
    assert resolve_dtype("bfloat16", _config("float16")) == torch.bfloat16


def test_a_dtype_that_is_not_computed_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"float16.*--dtype float32 or bfloat16"):
        resolve_dtype("auto", _config("float16"))


def test_devices_by_name() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert is_exact(CPU)
    assert not is_exact(torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", available_kernels(CPU, _config("bfloat16")), ids=lambda kernels: kernels.name)
def test_the_fingerprint_does_not_depend_on_threads(kernels: Kernels, dtype: torch.dtype) -> None:
    fingerprint = numerics_fingerprint(CPU, dtype, kernels)
    torch.set_num_threads(2)
    assert numerics_fingerprint(CPU, dtype, kernels) == fingerprint
    assert str(dtype).removeprefix("torch.") in fingerprint
    assert f"kernels={kernels.name} " in fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_kernels_give_another_digest_than_native_ones(dtype: torch.dtype) -> None:
    """Native ones may agree with one another: they take the same steps."""
    *native, reference = (numerics_fingerprint(CPU, dtype, k) for k in available_kernels(CPU, _config("bfloat16")))
    for fingerprint in native:
        assert fingerprint.rpartition("probe=")[2] != reference.rpartition("probe=")[2]


def _print_elsewhere(*expressions: str, **environment: str) -> list[str]:
    """What a process of its own prints, a line each, in which the libraries find these settings."""
    program = f"import torch; from tests.unit.model.test_numerics import *; print({', '.join(expressions)}, sep='\\n')"
    output = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, check=True, capture_output=True, text=True
    )
    return output.stdout.splitlines()


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="the limit below changes nothing on this instruction set"
)
def test_another_instruction_set_gives_another_fingerprint() -> None:
    (limited,) = _print_elsewhere("numerics_fingerprint(CPU, torch.bfloat16, TORCH)", ONEDNN_MAX_CPU_ISA="AVX2")
    assert limited != numerics_fingerprint(CPU, torch.bfloat16, TORCH)
    assert limited.startswith("device=cpu")


def fp32_product() -> str:
    """Digest of a product as large as a router's, past the code under test; its numbers need no generator."""
    x, weight = torch.arange(32 * 7168.0).view(32, 7168).sin(), torch.arange(256 * 7168.0).view(256, 7168).cos()
    return hashlib.sha256(torch.nn.functional.linear(x, weight).numpy().tobytes()).hexdigest()


def test_other_kernels_for_fp32_products_give_another_fingerprint_whatever_the_dtype() -> None:
    """Families that choose experts in fp32 compute with such a kernel in a bf16 model too."""
    dtypes = (torch.float32, torch.bfloat16)
    product, *fingerprints = _print_elsewhere(
        "fp32_product()", *(f"numerics_fingerprint(CPU, {dtype}, TORCH)" for dtype in dtypes), MKL_CBWR="COMPATIBLE"
    )
    if product == fp32_product():
        pytest.skip("the setting changes no product on this processor")
    for dtype, fingerprint in zip(dtypes, fingerprints, strict=True):
        assert f"dtype={str(dtype).removeprefix('torch.')}" in fingerprint
        assert fingerprint != numerics_fingerprint(CPU, dtype, TORCH)
