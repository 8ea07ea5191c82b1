import pytest
import torch

import harness

# Ranks and the single-process reference both run on one thread: same kernels, and two cores are enough.
torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    modules = {item.module.__name__ for item in session.items if isinstance(item, pytest.Function)}
    harness.preload(sorted(modules))
    harness.start_server()
