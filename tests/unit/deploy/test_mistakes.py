"""Whatever a user gets wrong is one line on stderr that names what is wrong and the fix."""

import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from common.model.synthesize import synthesize
from deploy.cli import main
from tests.fakes.plain_http import answering

_PROMPT = ["--prompt-tokens", "1", "--output-tokens", "1", "--slo-ttft", "1s", "--slo-itl", "1s"]
#: Commands that talk to a cluster, without its URL.
_CLIENTS = {
    "generate": ["generate", "--token-ids", "1"],
    "verify": ["verify", "--model", "m"],
    "status": ["status"],
    "advise": ["advise", *_PROMPT],
}
_URLS = {
    "no-host": "http://",
    "space": "http://a b",
    "bracket": "http://[::1",
    "port-word": "http://h:x",
    "port-large": "http://h:65536",
    "port-zero": "http://h:0",
    "scheme": "ftp://h",
    "no-scheme": "h:8000",
}


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """`verify` sends logs to the stderr of its test, which is closed afterwards."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    synthesize("qwen3_moe", "tiny", 0, {}, path)
    return path


def complaint(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(argv)
    found = capsys.readouterr()
    assert not found.out
    assert found.err.count("\n") == 1
    assert found.err.startswith("moerelay: error: ")
    return code, found.err.removeprefix("moerelay: error: ").rstrip()


@pytest.mark.parametrize("url", _URLS.values(), ids=_URLS)
@pytest.mark.parametrize("command", _CLIENTS.values(), ids=_CLIENTS)
def test_a_url_that_is_none(command: list[str], url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = complaint([*command, "--url", url], capsys)
    assert code == 2
    assert line.startswith(f"argument --url: {url!r} is not a URL such as http://127.0.0.1:8000; see moerelay ")


@pytest.mark.parametrize("command", _CLIENTS.values(), ids=_CLIENTS)
def test_nobody_answers(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # Port 1 needs privileges to listen on, and nobody does.
    code, line = complaint([*command, "--url", "http://127.0.0.1:1"], capsys)
    assert code == 1
    assert line.startswith("nothing answers at http://127.0.0.1:1: ")
    assert line.endswith("; does it run, and is --url right?")


@pytest.mark.parametrize("command", _CLIENTS.values(), ids=_CLIENTS)
def test_somebody_else_answers(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with answering(404, "text/html", b"<h1>no such page</h1>") as url:
        code, line = complaint([*command, "--url", url], capsys)
        https_code, https_line = complaint([*command, "--url", url.replace("http", "https")], capsys)
    assert (code, https_code) == (1, 1)
    assert line.startswith(f"HTTP 404 from {url}/")
    assert line.endswith("which is no answer of a router: <h1>no such page</h1>; is --url right?")
    assert https_line.startswith(f"{url.replace('http', 'https')} speaks no TLS that we do: ")
    assert https_line.endswith("; is it meant to be http://?")


@pytest.mark.parametrize("command", [*_CLIENTS.values(), ["up", "--model", "m", "--port", "0"]], ids=[*_CLIENTS, "up"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe", "cannot be read: it is not text"),
        (b"# only a comment\n", "holds no key; write one per line"),
        (b"two words\n", "line 1: a key is visible ASCII characters without spaces"),
    ],
    ids=["missing", "binary", "empty", "spaces"],
)
def test_a_key_file_that_is_none(
    command: list[str], content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.txt"
    if content is not None:
        path.write_bytes(content)
    code, line = complaint([*command, "--api-key-file", str(path)], capsys)
    assert code == 2
    assert line.startswith(f"--api-key-file {path}")
    assert words in line


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b"{", "config.json cannot be read: "),
        ("config.json", b"\xff\xfe", "config.json cannot be read: "),
        ("config.json", b"[]", "config.json does not hold a JSON object"),
        ("config.json", b"{}", "config.json: model_type None with architectures [] is not supported; supported "),
        ("generation_config.json", b"[]", "generation_config.json does not hold a JSON object"),
    ],
    ids=["cut", "binary", "list", "empty", "generation"],
)
def test_up_with_a_broken_checkpoint(
    checkpoint: Path, tmp_path: Path, name: str, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "m")
    (path / name).write_bytes(content)
    code, line = complaint(["up", "--model", str(path), "--port", "0"], capsys)
    assert code == 2
    assert line.startswith(f"{path}/{words}")


@contextmanager
def _taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_up_on_a_port_that_is_taken(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with _taken() as port:
        code, line = complaint(["up", "--model", "m", "--port", "0", flag, str(port)], capsys)
    assert code == 2
    assert line.startswith(f"127.0.0.1:{port} is taken by ")
    assert line.endswith(f" (process {os.getpid()}); end it, or choose another {flag} (0: a free one)")


_MISTAKES = {
    "no-model": (["up", "--model", ""], "--model is missing: checkpoint directory, or "),
    "port-large": (
        ["up", "--model", "m", "--port", "65536"],
        "--port 65536: must be a whole number from 0 to 65535, e.g. --port 8000",
    ),
    "port-word": (
        ["up", "--model", "m", "--port", "x"],
        "--port x: must be a whole number from 0 to 65535, e.g. --port 8000",
    ),
    "decode-word": (
        ["up", "--model", "m", "--decode", "many"],
        "--decode many: must be a whole number of at least 1, e.g. ",
    ),
    "ratio": (
        ["up", "--model", "m", "--trace-sample-ratio", "2"],
        "--trace-sample-ratio 2: must be a number from 0 to 1,",
    ),
    "seconds": (
        ["up", "--model", "m", "--start-timeout-s", "0"],
        "--start-timeout-s 0: must be a number of more than 0, ",
    ),
    "size-zero": (
        ["up", "--model", "m", "--swap-space", "x"],
        "--swap-space: 'x' is not a size; write a number with B, ",
    ),
    "up-alone": (
        ["up"],
        "--model is missing: checkpoint directory, or a Hugging Face hub id, e.g. --model models/tiny",
    ),
    "duration": (
        ["up", "--model", "m", "--slo-ttft", "fast"],
        "--slo-ttft: 'fast' is not a duration; write a number with ",
    ),
    "flag": (["up", "--modl", "m"], "unrecognized arguments: --modl m; did you mean --model?; see moerelay up --help"),
    "flag-and-required": (["verify", "--modl", "m"], "unrecognized arguments: --modl; did you mean --model?; see "),
    "flag-unlike-any": (["doctor", "--zzz"], "unrecognized arguments: --zzz; see moerelay doctor --help"),
    "model-as-a-word": (["up", "m"], "unrecognized arguments: m; did you mean --model m?; see moerelay up --help"),
    "another-word": (["up", "--model", "m", "n"], "unrecognized arguments: n; see moerelay up --help"),
    "word-after-generate": (
        ["generate", "--prompt", "a", "b"],
        "unrecognized arguments: b; see moerelay generate --help",
    ),
    "flag-of-vllm": (
        ["up", "m", "--gpu-memory-utilization", "0.9"],
        "unrecognized arguments: m --gpu-memory-utilization 0.9; did you mean --model m?; vLLM's "
        "--gpu-memory-utilization is --kv-cache-memory here: a size, e.g. --kv-cache-memory 4GiB; see moerelay ",
    ),
    "command": (["upp"], "there is no command 'upp'; did you mean up? choose from up, generate, "),
    "command-unlike-any": (["zzz"], "there is no command 'zzz'; choose from up, generate, "),
    "command-of-vllm": (
        ["serve", "m"],
        "there is no command 'serve'; vLLM's serve is `moerelay up --model MODEL` here; ",
    ),
    "choice": (["up", "--model", "m", "--kernels", "fast"], "--kernels fast: must be one of auto, avx512_bf16, "),
    "switch": (
        ["up", "--model", "m", "--enable-prefix-caching=maybe"],
        "--enable-prefix-caching takes no value such as 'maybe'; write --enable-prefix-caching or "
        "--no-enable-prefix-caching; see moerelay up --help",
    ),
    "switch-and-word": (
        ["up", "--insecure", "false"],
        "--insecure takes no value such as 'false'; write --insecure or --no-insecure; see moerelay up --help",
    ),
    "switch-before-a-model": (["up", "--insecure", "m"], "unrecognized arguments: m; did you mean --model m?"),
    "switch-of-a-command": (
        ["status", "--json=1"],
        "--json takes no value such as '1'; write --json or leave it out; see moerelay status --help",
    ),
    "doctor-port": (["doctor", "--port", "65536"], "argument --port: 65536 is too large; at most 65535"),
    "doctor-size": (["doctor", "--kv-cache-memory", "1 GX"], "argument --kv-cache-memory: '1 GX' is not a size"),
    "tokenizer": (["generate", "--prompt", "a", "--model", "/"], "/tokenizer.json does not exist; name a checkpoint"),
    "dump": (["verify", "--model", "m", "--dump", "/no/x"], "--dump /no/x: the directory /no does not exist"),
    "replay": (["replay", "/no/x", "--model", "m"], "/no/x is no file of a self-check: "),
    "days": (["keys", "init", "/no/x", "--days", "36526"], "argument --days: 36526 is too large; at most 36525"),
    "keys": (["keys", "show", "/no/x"], "/no/x/authority.json cannot be read: No such file or directory; `moerelay "),
    "shell": (["completion", "tcsh"], "argument shell: invalid choice: 'tcsh' (choose from 'bash', 'zsh', 'fish')"),
    "family": (["make-model", "--family", "x", "--out", "o"], "argument --family: invalid choice: 'x' (choose from"),
}


@pytest.mark.parametrize(("argv", "start"), _MISTAKES.values(), ids=_MISTAKES)
def test_other_mistakes(argv: list[str], start: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = complaint(argv, capsys)
    assert code == 2
    assert line.startswith(start)


def test_a_tokenizer_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    code, line = complaint(["generate", "--prompt", "a", "--model", str(tmp_path)], capsys)
    assert code == 2
    assert line.startswith(f"{tmp_path}/tokenizer.json is not a tokenizer: ")


def test_a_checkpoint_larger_than_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two matrices of 260 × 2^24 values alone are 32 GiB in fp32; all layers together, thousands of times that."""
    sizes = ["--set", f"hidden_size={2**24}", "--set", f"moe_intermediate_size={2**20}"]
    code, line = complaint(["make-model", "--family", "qwen3_moe", "--out", str(tmp_path), *sizes], capsys)
    assert code == 2
    assert line.startswith(f"{tmp_path} needs ")
    assert line.endswith(" GiB are free there; choose another directory or smaller sizes")
    assert not list(tmp_path.iterdir())
