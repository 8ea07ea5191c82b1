"""Peak host memory of load_hf and save_hf on a model of 650 MB, against each rank's own part."""

import pytest
import torch

import harness
import ptx
from ptx.hf import load_hf, save_hf
from ptx.hf._names import hf_key
from ptx.hf._read import BLOCK
from ptx.hf._safetensors import header_bytes

MIB = 2**20
ARGS = ptx.ModelArgs(
    dim=1536, n_layers=6, n_heads=12, n_kv_heads=4, hidden_dim=6144, vocab_size=32_000
)
MESHES = {
    "1": {},
    "dp_shard 2": {"dp_shard": 2},
    "tp 2": {"tp": 2},
    "dp_shard 2 x tp 2": {"dp_shard": 2, "tp": 2},
}
# What allocators and the interpreter keep besides: measured 6 to 21 MiB for a load of a tiny model.
SLACK = 32 * MIB


@pytest.mark.bench
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_load_takes_the_shards_and_a_block(mesh, tmp_path):
    write_zeros(tmp_path / "model.safetensors")
    size = torch.Size(MESHES[mesh].values()).numel()
    for rank, (shards, largest, load, save) in enumerate(
        harness.run(measure, size, MESHES[mesh], tmp_path, timeout=500)
    ):
        print(
            f"{mesh}, rank {rank}: shards {shards / MIB:.0f} MiB, largest tensor"
            f" {largest / MIB:.0f} MiB, load {load / MIB:.0f} MiB above the start,"
            f" save {save / MIB:.0f} MiB above the model"
        )
        assert load < shards + BLOCK + SLACK < shards + largest
        # One tensor in bfloat16, and torch's and gloo's buffers for gathering it.
        assert save < 5 * largest / 2 + SLACK


def measure(degrees, folder):
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    with torch.device("meta"):
        model = ptx.Transformer(ARGS)
    ptx.apply_tp(model, mesh["tp"])
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    start = reset_peak()
    load_hf(model, folder / "model.safetensors")
    load = peak() - start
    shards = sum(parameter.to_local().numel() * 4 for parameter in model.parameters())
    start = reset_peak()
    save_hf(model, folder / "out", dtype=torch.bfloat16)
    return shards, largest, load, peak() - start


def write_zeros(file):
    with torch.device("meta"):
        model = ptx.Transformer(ARGS)
    tensors = [
        (hf_key(name), torch.bfloat16, tuple(p.shape)) for name, p in model.named_parameters()
    ]
    header = header_bytes(tensors)
    with open(file, "wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + 2 * sum(p.numel() for p in model.parameters()))
    assert file.stat().st_size > 500e6


def reset_peak():
    """Linux: from here on the peak counts anew."""
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return peak()


def peak():
    with open("/proc/self/status") as stream:
        line = next(line for line in stream if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
