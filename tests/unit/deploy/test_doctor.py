"""`moerelay doctor`, on this machine and on machines written down as files."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from common.cores import affinity
from common.model import native
from common.model.synthesize import synthesize
from deploy.cli import main
from deploy.doctor.check import Check
from deploy.doctor.checkpoint import Use, examine
from deploy.doctor.keys import inspect
from deploy.doctor.listeners import Listener, listener
from deploy.doctor.machine import Kernels, check_kernels, check_machine, check_torch
from deploy.host import Host, this_host
from tests.ports import reserved_port

_CPUINFO = """processor\t: 0
model name\t: Example 9000 @ 2.00GHz
flags\t\t: fpu sse2 avx2 fma bmi2 f16c avx512f avx512_bf16

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


#: Whatever is busy on this machine, a free port there is.
_DOCTOR = ["doctor", "--port", "0"]


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


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code, and the lines that are neither about the machine nor about free ports, with single spaces."""
    code = main([*_DOCTOR, *argv])
    found = capsys.readouterr()
    assert not found.err
    lines = [" ".join(line.split()) for line in found.out.splitlines()]
    of_machine = ("moerelay", "torch", "processor", "cores", "memory", "huge", "kernels", "free")
    return code, [line for line in lines if line.split()[1] not in of_machine]


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_DOCTOR) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"ok    moerelay    {version('moerelay')}, Python 3.")
    assert f"ok    torch       {version('torch')}" in lines
    for variant in native.VARIANTS:
        (line,) = [line for line in lines if line.split()[1:3] == ["kernels", variant]]
        assert line.split()[3] == ("yes" if variant in native.available() else "no:")
    assert all(line.split()[0] in ("ok", "warn") for line in lines)


def test_a_port_that_is_taken_and_by_whom(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, (line,) = said(["--port", str(port)], capsys)
    assert code == 1
    assert line.startswith(f"bad port 127.0.0.1:{port} is taken by ")
    assert line.endswith(f"(process {os.getpid()}); end it, or choose another --port (0: a free one)")


def test_a_port_that_two_want(capsys: pytest.CaptureFixture[str]) -> None:
    with reserved_port() as port:
        code, lines = said(["--worker-port", str(port), "--worker-port", "0", "--handoff-port", str(port)], capsys)
    assert code == 1
    assert lines == [
        f"ok port --worker-port: 127.0.0.1:{port} is free",
        f"bad port 127.0.0.1:{port} is wanted by --worker-port and by --handoff-port; change one of them",
    ]


def test_an_address_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever listens on the same port here has nothing to do with it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        # 192.0.2.0/24 is for documentation (RFC 5737).
        code, lines = said(["--host", "192.0.2.1", "--admin-port", str(port)], capsys)
    assert code == 1
    assert [line for line in lines if str(port) in line] == [
        f"bad port cannot listen on 192.0.2.1:{port}: Cannot assign requested address; "
        "choose another --admin-port (0: a free one) or --host"
    ]


def test_who_listens_by_the_files_of_the_kernel(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    rest = "00000000:00000000 00:00000000 00000000     0        0"
    _write(
        tmp_path,
        {
            # 8000 is 1F40. The first is a connection (01), which keeps nobody from listening.
            "proc/net/tcp": f"{head}   0: 0100007F:1F40 0100007F:D431 01 {rest} 71 1\n",
            "proc/net/tcp6": f"{head}   0: {'0' * 32}:1F40 {'0' * 32}:0000 0A {rest} 72 1\n",
            "proc/12/cmdline": "/usr/bin/python3\0-m\0router\0",
            "proc/13/cmdline": "sh\0",
        },
    )
    for pid, inode in ((12, 72), (13, 71)):
        (tmp_path / f"proc/{pid}/fd").mkdir()
        (tmp_path / f"proc/{pid}/fd/3").symlink_to(f"socket:[{inode}]")
    assert listener(8000, root=tmp_path) == Listener(12, "python3 -m router")
    assert listener(8001, root=tmp_path) is None


def test_json_for_a_model(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_DOCTOR, "--model", str(checkpoint), "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fastest = [*native.available(), "torch"][0]
    assert found["model"]["kernels"] == fastest
    assert (found["model"]["family"], found["model"]["dtype"]) == ("qwen3_moe", "float32")
    assert f"kernels={fastest} " in found["model"]["numerics"]
    assert [kernels["name"] for kernels in found["kernels"]] == [*native.VARIANTS, "torch"]
    assert found["host"]["threads"] <= len(affinity())
    assert {check["verdict"] for check in found["checks"]} <= {"ok", "warn"}
    assert [c["name"] for c in found["checks"]][-6:] == ["model", "numerics", "weights", "tokenizer", "room", "context"]


def test_a_model_that_native_kernels_do_not_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthesize("qwen3_moe", "tiny", 0, {"moe_intermediate_size": 37}, tmp_path / "odd")
    assert main([*_DOCTOR, "--model", str(tmp_path / "odd")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.split()[1:3] == ["kernels", "portable"]]
    assert line.endswith("no: native kernels take two inputs at a time, and the width of experts is 37")
    (line,) = [line for line in lines if line.split()[1] == "model"]
    assert line.endswith("kernels torch")


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = tmp_path / "none"
    assert said(["--model", str(none)], capsys) == (
        1,
        [f"bad model {none} is not a directory; give a checkpoint directory or a Hugging Face hub id"],
    )


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("config.json", "{", "bad model {path}/config.json cannot be read: Expecting property name"),
        ("config.json", '{"model_type": "llama"}', "bad model {path}/config.json: model_type 'llama'"),
        ("model.safetensors", "x" * 100, "bad weights {path}/model.safetensors cannot be read as safetensors: "),
        ("tokenizer.json", "{}", "bad tokenizer {path}/tokenizer.json is not a tokenizer: "),
    ],
    ids=["config", "family", "weights", "tokenizer"],
)
def test_a_broken_file_of_a_checkpoint(
    checkpoint: Path, tmp_path: Path, name: str, content: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "m")
    (path / name).write_text(content)
    code, lines = said(["--model", str(path)], capsys)
    bad = [each for each in lines if each.startswith("bad")]
    assert (code, len(bad)) == (1, 1)
    assert bad[0].startswith(line.format(path=path))


def test_a_checkpoint_without_a_tokenizer_can_be_served(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer.json"))
    code, lines = said(["--model", str(path)], capsys)
    assert code == 0
    assert any(line.startswith("warn tokenizer the checkpoint has none") for line in lines)


def _host(**changes: object) -> Host:
    values: dict[str, object] = {
        "processor": "Example", "flags": (), "cpus": "0-7", "threads": 8, "cpu_quota": None, "memory": 2**33,
        "memory_available": 2**32, "memory_limit": None, "huge_pages": "madvise",
    }  # fmt: skip
    return Host(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "limit", "verdict"),
    [(3, None, "ok"), (4, None, "bad"), (3, 2 * 2**30, "bad"), (1, 2 * 2**30, "ok")],
    ids=["three", "four", "three-in-a-cgroup", "one-in-a-cgroup"],
)
def test_room_for_weights_and_kv(checkpoint: Path, workers: int, limit: int | None, verdict: str) -> None:
    """4 GiB are available: three workers with 1 GiB of KV and less than 1 MiB of weights fit in, four do not."""
    model, checks = examine(str(checkpoint), Use("float32", workers, 2**30), _host(memory_limit=limit))
    [room] = [check for check in checks if check.name == "room"]
    assert room.verdict == verdict
    # 4 bytes for each value in the files, which hold nothing else than the tensors and a header.
    assert model is not None
    assert 0 < 2 * (checkpoint / "model.safetensors").stat().st_size - model.weight_bytes < 2**16


@pytest.mark.parametrize(
    ("flags", "verdict", "words"),
    [
        (["--max-model-len", "64"], "ok", "64 tokens; the KV cache of a worker holds "),
        (["--max-model-len", "1000000"], "bad", "--max-model-len 1000000 exceeds the "),
        (["--kv-cache-memory", "1000"], "bad", "--kv-cache-memory of 1000 bytes holds fewer than 2 blocks "),
    ],
    ids=["fits", "too-long", "no-memory"],
)
def test_a_context(
    checkpoint: Path, flags: list[str], verdict: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = said(["--model", str(checkpoint), *flags], capsys)
    assert code == (verdict == "bad")
    assert any(line.startswith(f"{verdict} context {words}") for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = said(["--model", str(checkpoint), "--device", "cuda"], capsys)
    assert (code, lines[-1]) == (1, "bad model --device cuda: torch finds no CUDA device here; use --device cpu")


def _found(checks: Iterator[Check], verdict: str = "warn") -> list[str]:
    return [f"{check.name}: {check.found}; {check.fix}" for check in checks if check.verdict == verdict]


def test_what_could_be_better() -> None:
    assert not _found(check_machine(_host()))
    assert _found(check_machine(_host(huge_pages="never"))) == [
        "huge pages: never, which slows down the reading of weights; "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    ]
    assert "grants 2.5, fewer than there are" in _found(check_machine(_host(cpu_quota=2.5)))[0]
    native_set, slow, torch = Kernels("portable", None), Kernels("portable", "not built"), Kernels("torch", None)
    assert not _found(check_kernels([native_set, torch]))
    (kernels,) = _found(check_kernels([slow, torch]))
    assert kernels.endswith("yes, and nothing faster; install again where there is a C++ compiler")
    assert check_torch(None).fix == "pip install 'moerelay[worker]'"


def test_keys_of_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "init", str(tmp_path), "--days", "40"]) == 0
    decode = tmp_path / "decode.json"
    values = json.loads(decode.read_text())
    capsys.readouterr()
    code, lines = said(["--cluster-key-file", str(decode)], capsys)
    assert code == 0
    assert lines == [
        f"ok keys {decode}: decode, cluster {values['cluster']}, generation 1",
        "ok key pair the private key is that of the certificate",
        f"ok validity {decode}: until {values['expires']}",
        f"ok mode {decode}: 0600",
    ]


def test_keys_that_others_can_read_and_that_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "init", str(tmp_path), "--days", "40"])
    decode, now = tmp_path / "decode.json", datetime.now(UTC)
    expires = json.loads(decode.read_text())["expires"]
    decode.chmod(0o640)
    keys, checks = inspect(decode, now + timedelta(days=30))
    assert keys is not None
    rotate = "run `moerelay keys rotate` where the file was made"
    assert _found(iter(checks)) == [
        f"validity: {decode}: the certificate ends on {expires}, in {keys.days_left} days; {rotate}",
        f"mode: {decode} has mode 0640, and others can read it; chmod 600 {decode}",
    ]
    assert 8 <= keys.days_left <= 10
    _, checks = inspect(decode, now + timedelta(days=42))
    assert _found(iter(checks), "bad") == [f"validity: {decode}: the certificate ended on {expires}; {rotate}"]


def test_keys_of_two_processes_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "init", str(tmp_path)])
    capsys.readouterr()
    decode, router = tmp_path / "decode.json", tmp_path / "router.json"
    values = json.loads(decode.read_text())
    for private_key, complaint in (
        (json.loads(router.read_text())["private_key"], "its private key is not that of its certificate"),
        ("no key", "it holds what is no certificate or key"),
    ):
        decode.write_text(json.dumps(values | {"private_key": private_key}))
        code, lines = said(["--cluster-key-file", str(decode)], capsys)
        assert code == 1
        fix = "make it anew with `moerelay keys rotate`"
        assert f"bad keys --cluster-key-file {decode} is damaged: {complaint}; {fix}" in lines


def test_keys_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    code, lines = said(
        ["--cluster-key-file", f"{tmp_path}/empty", "--api-key-file", f"{tmp_path}/no", "--admin-key-file", "/"], capsys
    )
    assert code == 1
    starts = ("is no file of `moerelay keys`", "cannot be read: No such file", "cannot be read: Is a directory")
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith("bad keys --")
        assert start in line


def test_keys_of_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# of a friend\none\ntwo\n")
    keys.chmod(0o644)
    code, lines = said(["--api-key-file", str(keys)], capsys)
    assert code == 0
    assert lines[0] == f"ok keys {keys}: 2 for --api-key-file"
    assert lines[1].startswith(f"warn mode {keys} has mode 0644")


def test_a_model_without_a_package_that_workers_need(checkpoint: Path) -> None:
    """In a process of its own: here the package has been imported long ago."""
    code = "import sys; sys.modules['xxhash'] = None; from deploy.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "doctor", "--model", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("moerelay: error: doctor --model needs the workers' packages: pip install")
    assert done.stderr.count("\n") == 1
