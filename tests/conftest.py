import pytest
import torch

import harness

# Ranks and the single-process reference both run on one thread: same kernels, and two cores are enough.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def pytest_collection_finish(session: pytest.Session) -> None:
    modules = {item.module.__name__ for item in session.items if isinstance(item, pytest.Function)}
    harness.preload(sorted(modules))
    harness.start_server()
