"""The console script: what it prints, how it exits, what it imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import COMMANDS, main
from deploy.make_model import override
from deploy.verify.options import parse_options
from tests.unit.deploy.conftest import REPOSITORY


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert set(COMMANDS) <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "command", [[], ["up"], ["generate"], ["verify"], ["advise"], ["doctor"], ["make-model"], ["version"]]
)
def test_help_is_quick_because_it_imports_nothing_heavy(command: list[str]) -> None:
    program = (
        "import sys\nfrom deploy.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy imports'"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: moerelay {' '.join(command)}".rstrip())


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(argv)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return code, captured.err.rstrip()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["serve"],
            "there is no command 'serve'; vLLM's serve is `moerelay up --model MODEL` here; ",
        ),
        (["generate", "--prompt", "a", "--token-ids", "1"], "not allowed with argument --prompt"),
        (["generate", "--token-ids", "1,x"], "'1,x' is not a list of token ids such as 1,2,3"),
        (["generate", "--url", "localhost", "--token-ids", "1"], "'localhost' is not a URL"),
        (
            ["generate", "--token-ids", "1", "--api-key-file", "/no/such"],
            "--api-key-file /no/such cannot be read: No such",
        ),
        (["verify", "--model", "m", "--api-key-file", "/no/such"], "--api-key-file /no/such cannot be read"),
        (["verify", "--model", "m", "--requests", "0"], "argument --requests: 0 is too small; at least 1"),
        (["make-model", "--family", "mixtral", "--out", "o", "--set", "x"], "'x' is not KEY=VALUE, e.g."),
        (["up", "--model", "m", "--tensor-parallel-size", "2"], "--tensor-parallel-size must be 1"),
        (["up", "--model", "m", "--bogus", "1"], "unrecognized arguments: --bogus 1"),
        (["up", "--model", "m", "--kv-cache-memory", "inf"], "'inf' is not a size"),
        (["up", "--model", "m", "--config=/no/such.toml"], "--config /no/such.toml: "),
        (["up", "--model", "m", "--prefill", "0"], "--prefill must be at least 1 in disaggregated mode"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = error_of(argv, capsys)
    assert code == 2
    assert line.startswith("moerelay: error: ")
    assert sentence in line


@pytest.mark.parametrize("command", [["version"], ["generate", "--token-ids", "1"], ["make-model", "--help"]])
def test_a_variable_that_no_setting_knows_is_an_error_of_every_command(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOERELAY_PREFIL", "2")
    code, line = error_of(command, capsys)
    assert (code, line) == (
        2,
        "moerelay: error: no setting knows the environment variable MOERELAY_PREFIL; did you mean MOERELAY_PREFILL?",
    )


def test_make_model_without_torch_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "common.model.synthesize", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # what the import system takes for "not installed"
    code, line = error_of(["make-model", "--family", "mixtral", "--out", str(tmp_path / "m")], capsys)
    assert code == 2
    assert "make-model needs the workers' packages: pip install 'moerelay[worker]'" in line


def test_failures_at_run_time_exit_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 1 needs privileges to listen on, and nobody does.
    code, line = error_of(["generate", "--url", "http://127.0.0.1:1", "--token-ids", "1"], capsys)
    assert code == 1
    assert line.startswith("moerelay: error: nothing answers at http://127.0.0.1:1")


def test_a_directory_that_holds_something_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code, line = error_of(["make-model", "--family", "qwen3_moe", "--out", str(tmp_path)], capsys)
    assert (code, "is not empty" in line) == (2, True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("num_experts=257", 257),
        ("rms_norm_eps=1e-5", 1e-5),
        ("norm_topk_prob=false", False),
        ("mlp_only_layers=[0, 2]", [0, 2]),
        ("hidden_act=silu", "silu"),
        ("sliding_window=null", None),
    ],
)
def test_overrides_are_json_or_strings(text: str, value: object) -> None:
    key, got = override(text)
    assert key == text.split("=")[0]
    assert got == value
    assert type(got) is type(value)


def test_verify_takes_the_first_key_of_the_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# of the trainer\nfirst-key\nsecond-key\n")
    assert parse_options(["--model", "m", "--api-key-file", str(keys)]).api_key == "first-key"
    assert parse_options(["--model", "m"]).api_key is None
