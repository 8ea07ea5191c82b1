"""A count of a 405 B model takes a laptop's seconds and no memory to speak of."""

import json
import subprocess
import sys

import pytest

CODE = """
import json, resource, time
import torch
import ptx
from ptx.flops import estimate_flops_fake, transformer_flops
args = ptx.preset("llama3-405b")
with torch.device("meta"):
    model = ptx.Transformer(args)
    {step}
start = time.process_time()
count = estimate_flops_fake(model, torch.zeros(1, 8192, dtype=torch.long))
seconds = time.process_time() - start
assert count == transformer_flops(args, 1, 8192, ac={ac!r})
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({{"seconds": seconds, "bytes": peak, "total": count.total}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ac", ["none", "full", "selective"])
def test_405b_in_20_seconds_of_one_core_and_a_gigabyte(ac):
    step = "pass" if ac == "none" else f"ptx.apply_ac(model, {ac!r})"
    code = CODE.format(step=step, ac=ac)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"\n405 B, {ac}: {found['seconds']:.1f} s of CPU, {found['bytes'] / 2**30:.2f} GiB")
    assert found["seconds"] < 20
    assert found["bytes"] < 2**30
