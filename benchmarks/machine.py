"""Where and of what something was measured: machine, versions, commit."""

import hashlib
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from common.cores import num_cores

ROOT = Path(__file__).parents[1]
#: Instruction sets that decide which kernels run.
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True, slots=True)
class Machine:
    """What figures depend on. `load_average`: of the last minute, when this was asked."""

    cpu: str
    flags: tuple[str, ...]
    cores: int
    memory_gib: float
    huge_pages: str
    kernel: str
    python: str
    torch: str
    load_average: float

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def this_machine() -> Machine:
    name, flags = _cpu()
    return Machine(
        cpu=name,
        flags=tuple(flag for flag in _TELLING_FLAGS if flag in flags),
        cores=num_cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        huge_pages=_huge_pages(),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=torch.__version__,
        load_average=round(os.getloadavg()[0], 2),
    )


def commit() -> str:
    """The commit of the working tree, with "+" if tracked files differ from it; empty outside a repository."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if head and _git("status", "--porcelain", "--untracked-files=no") else "")


def state_of_the_code(root: Path = ROOT) -> str:
    """The commit, and a digest of what differs from it: changed files, and those that git does not know or ignore."""
    digest = hashlib.sha256(_git("diff", "--binary", "HEAD", root=root).encode())
    for name in _git("ls-files", "--others", "--exclude-standard", "-z", root=root).split("\0"):
        if (root / name).is_file():
            digest.update(f"\0{name}\0".encode() + (root / name).read_bytes())
    return f"{_git('rev-parse', 'HEAD', root=root)} {digest.hexdigest()[:12]}"


def _git(*arguments: str, root: Path = ROOT) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", root, *arguments], capture_output=True, errors="backslashreplace", check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpu() -> tuple[str, set[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), set()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    place = f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    name = f"{fields.get('model name', platform.machine())} ({place})"
    return name, set((fields.get("flags") or fields.get("Features") or "").split())


def _huge_pages() -> str:
    """The chosen mode of transparent huge pages: the word in brackets."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]
