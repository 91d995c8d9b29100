"""One torch thread per test process: several on shared cores only wait for one another."""

import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)
