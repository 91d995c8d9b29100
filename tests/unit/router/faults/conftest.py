"""A folder with a tokenizer of which tests know every byte."""

import pytest

from tests.unit.router.openai.vocabulary import write_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For `--model`: tokenizer and chat template."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))
