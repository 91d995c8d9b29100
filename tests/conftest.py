"""What holds for every test process."""

import torch
from hypothesis import settings


def pytest_configure() -> None:
    # Several threads per process on shared cores only wait for one another.
    torch.set_num_threads(1)
    # A deadline per example would fail on a busy machine; the timeout per test is enough.
    settings.register_profile("moerelay", deadline=None)
    settings.load_profile("moerelay")
