"""`moerelay doctor`, on this machine and on machines written down as files."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest

from common.cores import affinity
from common.model import native
from common.model.synthesize import synthesize
from deploy.cli import main
from deploy.doctor import Diagnosis, Kernels
from deploy.host import Host, this_host
from deploy.keys.inspection import inspect

_CPUINFO = """processor\t: 0
model name\t: Example 9000 @ 2.00GHz
flags\t\t: fpu sse2 avx2 fma bmi2 f16c avx512f avx512_bf16

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    synthesize("qwen3_moe", "tiny", 0, {}, path)
    return path


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_machine_by_its_files(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "proc/cpuinfo": _CPUINFO,
            "proc/meminfo": "MemTotal:       65536000 kB\nMemAvailable:   1024 kB\nHugePages_Total:       0\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/memory.max": "8589934592\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        },
    )
    host = this_host(root=tmp_path)
    assert host.processor == "Example 9000 @ 2.00GHz"
    assert host.flags == ("avx2", "fma", "bmi2", "f16c", "avx512f", "avx512_bf16")
    assert (host.memory, host.memory_available, host.memory_limit) == (65536000 * 1024, 2**20, 2**33)
    assert (host.cpu_quota, host.threads) == (0.5, 1)
    assert host.huge_pages == "madvise"


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_a_machine_that_tells_little(tmp_path: Path, limit: str) -> None:
    name = "memory.max" if limit == "max" else "memory/memory.limit_in_bytes"
    _write(tmp_path, {f"sys/fs/cgroup/{name}": limit})
    host = this_host(root=tmp_path)
    assert (host.flags, host.memory, host.memory_available, host.memory_limit) == ((), None, None, None)
    assert (host.huge_pages, host.cpu_quota) == (None, None)
    assert host.processor


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"moerelay {version('moerelay')}, Python 3.")
    assert f"torch {version('torch')}" in lines[0]
    for variant in native.VARIANTS:
        (line,) = [line for line in lines if line.split()[0] == variant]
        assert line.split(maxsplit=1)[1].startswith("yes" if variant in native.available() else "no: ")
    assert not any(line.startswith("model") for line in lines)


def test_json_for_a_model(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(checkpoint), "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fastest = [*native.available(), "torch"][0]
    assert found["model"]["kernels"] == fastest
    assert (found["model"]["family"], found["model"]["dtype"]) == ("qwen3_moe", "float32")
    assert f"kernels={fastest} " in found["model"]["numerics"]
    assert [kernels["name"] for kernels in found["kernels"]] == [*native.VARIANTS, "torch"]
    assert found["host"]["threads"] <= len(affinity())


def test_a_model_that_native_kernels_do_not_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthesize("qwen3_moe", "tiny", 0, {"moe_intermediate_size": 37}, tmp_path / "odd")
    assert main(["doctor", "--model", str(tmp_path / "odd")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.split()[0] == "portable"]
    assert line.endswith("no: native kernels take two inputs at a time, and the width of experts is 37")
    assert "  auto     torch" in lines


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def _diagnosis(torch: str | None, huge_pages: str, quota: float | None, *sets: Kernels) -> Diagnosis:
    host = Host("Example", (), "0-7", 8, quota, None, None, None, huge_pages)
    return Diagnosis("1", "3.11", torch, host, sets, None)


def test_advice_is_given_where_something_could_be_better() -> None:
    native_set, slow = Kernels("portable", None), Kernels("portable", "it was not built")
    torch = Kernels("torch", None)
    assert not list(_diagnosis("2", "madvise", None, native_set, torch).advice())
    (kernels, pages, quota) = _diagnosis("2", "never", 2.5, slow, torch).advice()
    assert "workers compute with torch" in kernels
    assert "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" in pages
    assert "grants 2.5 cpus" in quota
    (missing,) = _diagnosis(None, "always", None, Kernels("torch", "torch is not installed")).advice()
    assert "pip install 'moerelay[worker]'" in missing


def test_keys_of_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "init", str(tmp_path), "--days", "40"]) == 0
    decode = tmp_path / "decode.json"
    cluster = json.loads(decode.read_text())["cluster"]
    capsys.readouterr()
    assert main(["doctor", "--cluster-key-file", str(decode)]) == 0
    said = capsys.readouterr().out
    assert f"keys       {decode}: decode, cluster {cluster}\n  now      generation 1, good until " in said
    assert "decode.json is" not in said
    decode.chmod(0o640)
    later = inspect(decode, datetime.now(UTC) + timedelta(days=30))
    assert list(later.advice()) == [
        f"{decode} is good for {later.days_left} days: run `moerelay keys rotate` where it was made",
        f"{decode} has mode 0640; others can read it, which chmod 600 ends",
    ]
    decode.write_text("{}")
    assert main(["doctor", "--cluster-key-file", str(decode)]) == 2
    assert "is no file of `moerelay keys`" in capsys.readouterr().err


def test_a_model_without_a_package_that_workers_need(checkpoint: Path) -> None:
    """In a process of its own: here the package has been imported long ago."""
    code = "import sys; sys.modules['xxhash'] = None; from deploy.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "doctor", "--model", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("moerelay: error: doctor --model needs the workers' packages: pip install")
    assert done.stderr.count("\n") == 1
