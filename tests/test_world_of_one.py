"""Scripts run as ``python script.py`` and under torchrun, in real processes."""

import subprocess
import sys

SCRIPT = """
import sys, warnings
warnings.simplefilter("error")
import torch.distributed as dist
import ptx
mesh = ptx.build_mesh(tp=%d, device_type="cpu")
total = ptx.data_mesh(mesh).size() * mesh["tp"].size()
line = f"world {dist.get_world_size()} {total} {dist.get_backend()}\\n"
sys.stdout.write(line)  # in one piece, as ranks share the pipe
"""

# Work is in flight at the end, and its threads don't get hold of Python before the script is done with it.
IN_FLIGHT = """
import sys
import torch
import torch.distributed as dist
import ptx
mesh = ptx.build_mesh(device_type="cpu")
sys.setswitchinterval(1000)
tensors = [torch.ones(1000) for _ in range(100)]
for i, tensor in enumerate(tensors):
    dist.all_reduce(tensor, group=mesh.get_group(i % mesh.ndim), async_op=True)
"""


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_plain_python_is_a_world_of_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % 1)
    done = _run(sys.executable, str(script))
    assert done.stdout == "world 1 1 gloo\n"
    assert done.stderr == ""


def test_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % 2)
    done = _run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    )
    assert done.stdout == "world 2 2 gloo\n" * 2
    assert "Warning" not in done.stderr


def test_ends_well_while_threads_of_gloo_hold_tensors(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_FLIGHT)
    assert _run(sys.executable, str(script)).stderr == ""
