"""The native kernels: C++ in `csrc`, one extension module per instruction set, chosen by what this processor has.

They compute with addresses of tensors; `common.model.kernels.native` is what knows shapes and dtypes.
"""

import functools
import hashlib
import importlib
import platform
from pathlib import Path
from typing import cast

import torch  # noqa: F401 - loads the OpenMP runtime that the modules share

from common.model.native.interface import NativeModule

#: With the processor's flags (as Linux spells them) that each needs. Best first, but see `available`.
VARIANTS: dict[str, frozenset[str]] = {
    "avx512_bf16": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_bf16"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}),
    "portable": frozenset({"avx2", "fma", "bmi2", "f16c"}),
}


def load(variant: str) -> NativeModule:
    """The module of that name. Raises ImportError saying why there is none here."""
    if platform.machine() != "x86_64" and variant != "portable":
        raise ImportError("it is for x86-64 processors")
    if platform.machine() == "x86_64" and (missing := VARIANTS[variant] - _processor_flags()):
        raise ImportError(f"this processor lacks {', '.join(sorted(missing))}")
    try:
        # After torch, whose OpenMP runtime the module shares then.
        module = cast(NativeModule, importlib.import_module(f"{__name__}._{variant}"))
    except ModuleNotFoundError:
        raise ImportError("it was not built: `make setup` needs a C++20 compiler with OpenMP") from None
    if _source_digest() not in (None, module.source):
        raise ImportError("it was built from another source, which would be called wrongly: run `make setup` again")
    return module


def available() -> list[str]:
    """Variants that run here, best first.

    Intel's processors widen pairs although they have vdpbf16ps. A Xeon of family 6, model 207, begins one every other
    cycle, and two products of floats in each: prompts took 0.7 of the time, decode the same.
    """
    found = [variant for variant in VARIANTS if why_unavailable(variant) is None]
    if "avx512" in found and _processor_field("vendor_id") == "GenuineIntel":
        found.sort(key=lambda variant: variant != "avx512")
    return found


def why_unavailable(variant: str) -> str | None:
    """None if `load` gives the module."""
    try:
        load(variant)
    except ImportError as error:
        return str(error)
    return None


@functools.cache
def _source_digest() -> str | None:
    """Of the source beside this module, as setup.py computes it; None where only the modules are installed."""
    files = sorted((Path(__file__).parent / "csrc").glob("*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16] if files else None


@functools.cache
def _processor_flags() -> frozenset[str]:
    return frozenset(_processor_field("flags").split())


@functools.cache
def _processor_field(name: str) -> str:
    """What Linux says of the first processor; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")
