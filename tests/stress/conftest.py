"""What both kinds of random runs need."""

import logging
from collections.abc import Iterator

import pytest
import structlog
import torch


@pytest.fixture
def quiet() -> Iterator[None]:
    """One line per preemption would be most of the log."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a hundredfold when test processes share the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
