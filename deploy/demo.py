"""`python -m deploy.demo` (or `make demo`): everything once, on a tiny random model, in less than a minute.

A checkpoint, a cluster of one prefill and one decode worker, one streamed request, a bitwise check, a clean stop.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.processes import clean_environment

#: Small, so that the longer prompts of the check are prefilled in several chunks.
_CHUNK_TOKENS = 128
#: Longer than `up` itself needs to drain or to give up.
_STOP_TIMEOUT_S = 60.0
_PROMPT = "A router sends every token to a few experts."
#: As README.md goes on.
NEXT_STEPS = (
    "make-model --family qwen3_moe --preset tiny --seed 0 --out models/tiny",
    "up --model models/tiny --prefill 1 --decode 1 --port 8000",
)


class DemoFailedError(Exception):
    """A step did not end with exit code 0; the command has said why."""


def moerelay(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "deploy.cli", *arguments]


def narrate(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def run(*arguments: str) -> None:
    """Shows and runs one command. Raises DemoFailedError unless it succeeds."""
    print(f"$ moerelay {subprocess.list2cmdline(arguments)}", flush=True)
    code = subprocess.run(moerelay(*arguments), env=clean_environment(os.environ), check=False).returncode
    if code != 0:
        raise DemoFailedError(f"moerelay {arguments[0]} ended with exit code {code}")


@contextmanager
def cluster(*arguments: str) -> Iterator[str]:
    """Runs `moerelay up` and yields its URL; on leaving stops it and checks that it ended cleanly."""
    print(f"$ moerelay up {subprocess.list2cmdline(arguments)}", flush=True)
    environment = clean_environment(os.environ)
    with subprocess.Popen(moerelay("up", *arguments), stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline().strip()
            print(ready, flush=True)
            if not ready:
                raise DemoFailedError(f"moerelay up ended with exit code {process.wait()}")
            yield ready.rpartition(" ")[2]
        finally:
            code = _stop(process)
    if code != 0:
        raise DemoFailedError(f"moerelay up ended with exit code {code}")


def _stop(process: "subprocess.Popen[str]") -> int:
    process.send_signal(signal.SIGTERM)  # does nothing to a process that has ended
    try:
        return process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def demo(directory: Path) -> None:
    model = str(directory / "tiny")
    narrate("1. A tiny mixture-of-experts checkpoint with random weights")
    run("make-model", "--family", "qwen3_moe", "--preset", "tiny", "--seed", "0", "--out", model)
    narrate("2. A cluster: one prefill worker, one decode worker, one router")
    chunk = str(_CHUNK_TOKENS)
    with cluster(
        *("--model", model, "--prefill", "1", "--decode", "1", "--port", "0"),
        *("--max-num-batched-tokens", chunk, "--log-level", "warning"),
    ) as url:
        narrate("3. One streamed request, and the experts that computed it (random weights, so random text)")
        run("generate", "--url", url, "--prompt", _PROMPT, "--max-tokens", "24", "--temperature", "0", "--ignore-eos")
        narrate("4. Random requests, compared bit for bit with solo runs")
        run("verify", "--url", url, "--model", model, "--requests", "40", "--concurrency", "8")
        narrate("5. A clean stop")
    print("moerelay up ended with exit code 0")
    narrate("Next: a cluster of your own")
    program = os.path.relpath(Path(sys.executable).with_name("moerelay"))
    for arguments in NEXT_STEPS:
        print(f"{program} {arguments}")


def main() -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="moerelay-demo-") as directory:
            demo(Path(directory))
    except DemoFailedError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
