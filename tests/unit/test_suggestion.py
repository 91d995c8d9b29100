"""What is suggested instead of flags and commands that there are not."""

import re

import pytest

from common.config import UpSettings
from common.settings_loader import settings_parser
from common.suggestion import VLLM_COMMANDS, VLLM_FLAGS, about_arguments, close_match
from deploy.cli import COMMANDS


def test_what_is_said_instead_of_words_of_vllm_exists() -> None:
    flags = set(settings_parser(UpSettings, "moerelay up")._option_string_actions)
    assert not flags & VLLM_FLAGS.keys()
    assert set(re.findall(r"--[a-z][a-z-]*", " ".join(VLLM_FLAGS.values()))) <= flags
    assert {words.split()[0] for words in VLLM_COMMANDS.values()} <= COMMANDS.keys()
    assert not COMMANDS.keys() & VLLM_COMMANDS.keys()


@pytest.mark.parametrize(("word", "match"), [("--prefil", "--prefill"), ("prefill", "--prefill"), ("--x", None)])
def test_the_most_similar_word(word: str, match: str | None) -> None:
    assert close_match(word, ["--prefill", "--decode", "--port"]) == match


def test_a_value_of_an_unknown_flag_is_no_model() -> None:
    known = ["--model", "--port"]
    assert not about_arguments(["--zzz", "m"], ["--zzz", "m"], known)
    assert about_arguments(["--zzz=1", "m"], ["--zzz=1", "m"], known) == "did you mean --model m?"
    assert not about_arguments(["m"], ["--model=n", "m"], known)
