"""The native kernels: one source, compiled once per instruction set. Everything else stands in pyproject.toml.

A machine without a compiler, or with one that does not know the instructions, installs all the same: what cannot be
built is left out, and the workers compute with torch (see common/model/native).
"""

import hashlib
import platform
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

_SOURCE = "common/model/native/csrc/module.cpp"
_SOURCES = sorted(Path("common/model/native/csrc").iterdir())

#: A module tells which source it was built from: one that is left over from an older source is not used.
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]

_FLAGS = ["-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-psabi", "-Wno-ignored-attributes"]

#: By the machine's architecture: which modules, and what their instructions are called.
_VARIANTS = {
    "x86_64": {
        "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
        "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        "portable": ["-march=x86-64-v3"],
    }
}


def _extension(variant: str, flags: list[str]) -> Pybind11Extension:
    extension = Pybind11Extension(
        f"common.model.native._{variant}",
        [_SOURCE],
        cxx_std=20,
        define_macros=[("MOERELAY_MODULE", f"_{variant}"), ("MOERELAY_SOURCE", f'"{_DIGEST}"')],
        extra_compile_args=[*_FLAGS, *flags],
        extra_link_args=["-fopenmp"],
        depends=[str(path) for path in _SOURCES if path.suffix == ".h"],
    )
    extension.optional = True
    return extension


setup(
    ext_modules=[
        _extension(variant, flags) for variant, flags in _VARIANTS.get(platform.machine(), {"portable": []}).items()
    ],
    cmdclass={"build_ext": build_ext},
)
