"""Tests here change the number of torch threads; the next test starts with the number that this one found."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
