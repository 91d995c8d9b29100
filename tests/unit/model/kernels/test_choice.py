"""Which kernels a worker computes with, and what it says where there are no native ones."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.model import native
from common.model.config import ModelConfig
from common.model.families import config_from_json
from common.model.kernels.choice import available_kernels, choose_kernels
from common.model.presets import synthetic_config

_CPU = torch.device("cpu")
_ROOT = Path(__file__).parents[4]


def _config(family: str = "mixtral", **overrides: Any) -> ModelConfig:
    return config_from_json(synthetic_config(family, "tiny", overrides), {}, source="config.json")


def test_auto_is_the_first_that_is_available() -> None:
    names = [kernels.name for kernels in available_kernels(_CPU, _config())]
    assert names == [*native.available(), "torch"]
    assert choose_kernels("auto", _CPU, _config()).name == names[0]
    assert choose_kernels("torch", _CPU, _config()).name == "torch"


@pytest.mark.parametrize(
    ("vendor", "names"),
    [
        ("AuthenticAMD", ["avx512_bf16", "avx512", "portable"]),
        ("GenuineIntel", ["avx512", "avx512_bf16", "portable"]),
        ("", ["avx512_bf16", "avx512", "portable"]),
    ],
)
def test_which_set_is_best_depends_on_who_made_the_processor(
    monkeypatch: pytest.MonkeyPatch, vendor: str, names: list[str]
) -> None:
    monkeypatch.setattr(native, "why_unavailable", lambda _: None)
    monkeypatch.setattr(native, "_processor_field", {"vendor_id": vendor}.get)
    assert native.available() == names


@pytest.mark.parametrize("names", [["portable"], ["avx512", "portable"]])
def test_intel_processors_that_lack_instructions(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    monkeypatch.setattr(native, "why_unavailable", lambda variant: None if variant in names else "it lacks some")
    monkeypatch.setattr(native, "_processor_field", {"vendor_id": "GenuineIntel"}.get)
    assert native.available() == names


@pytest.mark.parametrize("name", native.available())
def test_a_native_set_by_name(name: str) -> None:
    assert choose_kernels(name, _CPU, _config()).name == name


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("mixtral", {"hidden_size": 75}, "the hidden size is 75"),
        ("qwen3_moe", {"moe_intermediate_size": 37}, "the width of experts is 37"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 29}, "that of the shared expert is 29"),
        ("deepseek_v3", {"kv_lora_rank": 37}, "the size of a cached vector is"),
        ("deepseek_v3", {"q_lora_rank": 29}, "the query rank is 29"),
    ],
)
def test_odd_sizes_are_computed_with_torch(family: str, overrides: dict[str, int], words: str) -> None:
    config = _config(family, **overrides)
    assert choose_kernels("auto", _CPU, config).name == "torch"
    assert [kernels.name for kernels in available_kernels(_CPU, config)] == ["torch"]
    with pytest.raises(ConfigError, match=f"--kernels portable: .*{words}.*; use --kernels auto or torch") as caught:
        choose_kernels("portable", _CPU, config)
    assert caught.value.param == "kernels"


def test_another_device_than_the_cpu_is_computed_with_torch() -> None:
    cuda = torch.device("cuda")
    assert choose_kernels("auto", cuda, _config()).name == "torch"
    with pytest.raises(ConfigError, match="compute on the CPU, not on cuda"):
        choose_kernels("avx512_bf16", cuda, _config())


#: What a process of its own prints: the choices, and before that its log. Modules are hidden by an import hook, and the
#: processor's flags are those of a machine of 2012.
_WITHOUT = """
import sys
{hide}
from tests.unit.model.kernels.test_choice import _CPU, _config
from common.errors import ConfigError
from common.model.kernels.choice import choose_kernels
print([choose_kernels("auto", _CPU, _config()).name for _ in range(3)])
try:
    choose_kernels("avx512_bf16", _CPU, _config())
except ConfigError as error:
    print(error.message)
"""

_HIDE_MODULES = """
class Hidden:
    def find_spec(self, name, path, target=None):
        if name.startswith("common.model.native._"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
"""

_OLD_PROCESSOR = """
from common.model import native
native._processor_flags = lambda: frozenset({"sse4_2", "avx"})
"""


def _elsewhere(hide: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(hide=hide)], cwd=_ROOT, check=True, capture_output=True, text=True
    )
    return (done.stdout + done.stderr).splitlines()


def test_without_any_module_torch_computes_and_one_line_says_so() -> None:
    lines = _elsewhere(_HIDE_MODULES)
    assert "['torch', 'torch', 'torch']" in lines
    (warning,) = [line for line in lines if "native_kernels_unavailable" in line]
    assert "it was not built: `make setup` needs a C++" in warning
    assert all(f"{variant}: " in warning for variant in native.VARIANTS)
    (refusal,) = [line for line in lines if line.startswith("--kernels avx512_bf16: ")]
    assert refusal.endswith("; use --kernels auto or torch")


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="flags are those of x86-64")
def test_a_processor_without_the_instructions_is_told_which_it_lacks() -> None:
    lines = _elsewhere(_OLD_PROCESSOR)
    assert "['torch', 'torch', 'torch']" in lines
    (refusal,) = [line for line in lines if line.startswith("--kernels avx512_bf16: ")]
    assert "this processor lacks avx512_bf16, avx512bw, avx512cd" in refusal
