"""Run the Python blocks of README.md and docs/, each page in one namespace on one process."""

import torch.distributed as dist
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


def _end_world(namespace):
    if dist.is_initialized():
        dist.destroy_process_group()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
    teardown=_end_world,
).pytest()
