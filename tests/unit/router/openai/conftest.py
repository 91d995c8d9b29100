"""A folder with a tokenizer and a chat template, and one without a template."""

from pathlib import Path

import pytest

from tests.unit.router.openai.vocabulary import write_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For `--model`: tokenizer and chat template."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model_without_template(tmp_path: Path) -> str:
    return write_tokenizer(tmp_path, chat=False)
