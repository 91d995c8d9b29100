"""What a run that goes on compares: the code, with what nobody has committed yet."""

import subprocess
from pathlib import Path

from benchmarks.machine import state_of_the_code


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=e")
    subprocess.run(["git", "-C", root, *who, *arguments], check=True, capture_output=True)


def test_changed_and_new_files_count_and_ignored_ones_do_not(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "known").write_bytes(b"\xff 1")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    states = [state_of_the_code(tmp_path)]
    for name, text in [("known", "2"), ("new", "1"), ("new", "2"), ("a name ü", "1")]:
        (tmp_path / name).write_text(text)
        states.append(state_of_the_code(tmp_path))
    assert len(set(states)) == 5
    (tmp_path / "ignored").write_text("1")
    assert state_of_the_code(tmp_path) == states[-1]
