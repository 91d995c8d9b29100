"""`make demo`: what it says at its end."""

from pathlib import Path

from deploy.demo import NEXT_STEPS


def test_the_next_steps_are_those_of_the_readme() -> None:
    lines = (Path(__file__).parents[3] / "README.md").read_text().splitlines()
    first, second = (
        [number for number, line in enumerate(lines) if line.startswith(f"moerelay {step}")] for step in NEXT_STEPS
    )
    assert [number + 1 for number in first] == second
    assert len(second) == 1
