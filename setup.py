"""The native kernels: one source, compiled once per instruction set. Everything else stands in pyproject.toml.

A machine without a compiler, or with one that does not know the instructions, installs all the same: what cannot be
built is left out, and the workers compute with torch (see common/model/native).
"""

import platform

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

_SOURCE = "common/model/native/csrc/module.cpp"

_FLAGS = ["-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-psabi", "-Wno-ignored-attributes"]

#: By the machine's architecture: which modules, and what their instructions are called.
_VARIANTS = {
    "x86_64": {
        "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
        "portable": ["-march=x86-64-v3"],
    }
}


def _extension(variant: str, flags: list[str]) -> Pybind11Extension:
    extension = Pybind11Extension(
        f"common.model.native._{variant}",
        [_SOURCE],
        cxx_std=20,
        define_macros=[("MOERELAY_MODULE", f"_{variant}")],
        extra_compile_args=[*_FLAGS, *flags],
        extra_link_args=["-fopenmp"],
        depends=[f"common/model/native/csrc/{name}.h" for name in _HEADERS],
    )
    extension.optional = True
    return extension


_HEADERS = ("attention", "experts", "heads", "layers", "linear", "norm", "router", "team", "vec")

setup(
    ext_modules=[
        _extension(variant, flags) for variant, flags in _VARIANTS.get(platform.machine(), {"portable": []}).items()
    ],
    cmdclass={"build_ext": build_ext},
)
