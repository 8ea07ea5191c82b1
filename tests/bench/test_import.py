import statistics
import subprocess
import sys

import pytest

TIMED = "import time, torch; t = time.process_time(); import ptx; print(time.process_time() - t)"


@pytest.mark.bench
def test_import_ptx_adds_little_to_import_torch():
    seconds = statistics.median(
        float(subprocess.run([sys.executable, "-c", TIMED], capture_output=True, check=True).stdout)
        for _ in range(5)
    )
    print(f"\nimport ptx adds {seconds * 1e3:.1f} ms to import torch")
    assert seconds <= 0.15
