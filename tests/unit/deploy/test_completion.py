"""`moerelay completion`: what a real shell offers, and that nothing is left out."""

import shutil
import subprocess

import pytest

from common.config import UpSettings
from deploy.cli import COMMANDS, main
from deploy.completion import bash, described, fish, zsh


def offered(*words: str) -> list[str]:
    """What bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"{bash(described())}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words) - 1}\n_moerelay\n"
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert not done.stderr
    return [line for line in done.stdout.splitlines() if line]


def test_commands() -> None:
    assert offered("moerelay", "") == list(COMMANDS)
    assert offered("moerelay", "ver") == ["verify", "version"]


def test_flags_of_settings_and_of_parsers() -> None:
    assert offered("moerelay", "up", "--kv-cache") == ["--kv-cache-memory"]
    assert "--no-enable-prefix-caching" in offered("moerelay", "up", "--no-")
    assert offered("moerelay", "generate", "--token") == ["--token-ids"]
    assert offered("moerelay", "completion", "") == ["bash", "zsh", "fish", "--help"]


def test_values_of_a_flag() -> None:
    assert offered("moerelay", "make-model", "--family", "mix") == ["mixtral"]
    assert offered("moerelay", "make-model", "--preset", "") == ["tiny", "bench"]
    # Files are offered by bash itself.
    assert offered("moerelay", "make-model", "--out", "") == []


def test_every_setting_is_described_once() -> None:
    [up] = [command for command in described() if command.name == "up"]
    names = [flag.name for flag in up.flags]
    assert len(names) == len(set(names))
    assert {f"--{name.replace('_', '-')}" for name in UpSettings.model_fields} <= set(names)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command_and_flag(shell: str) -> None:
    commands = described()
    script = {"zsh": zsh, "fish": fish}[shell](commands)
    for command in commands:
        assert command.name in script
        for flag in command.flags:
            assert (f"{flag.name}[" if shell == "zsh" else f"-l {flag.name[2:]} ") in script
    # Every quote that opens closes.
    assert all(line.count("'") % 2 == 0 for line in script.splitlines())
    if path := shutil.which(shell):
        assert subprocess.run([path, "-n"], input=script, text=True, check=False).returncode == 0


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.strip() == bash(described())
    assert main(["completion", "tcsh"]) == 2
    assert "choose from" in capsys.readouterr().err
