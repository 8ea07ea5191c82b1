"""torch's own distributed checkpoint reads what is written, on any mesh."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard

import ptx
from ckpt.training import full_tensors, start
from harness import distributed, run
from ptx.ckpt import AsyncCheckpointer
from ptx.ckpt._zip import frame

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(), (1,), (3, 5), (0, 4), (2, 1, 7)], ids=str)
def test_a_framed_tensor_is_a_file_of_torch_save(
    dtype: torch.dtype, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    head, tail = frame(dtype, sizes)
    data = torch.randint(0, 2, (torch.Size(sizes).numel() * dtype.itemsize,), dtype=torch.uint8)
    path = tmp_path / "tensor.pt"
    path.write_bytes(head + bytes(data.tolist()) + tail)
    got = torch.load(path, weights_only=True)
    assert got.dtype == dtype
    assert got.shape == sizes
    assert got.reshape(-1).view(torch.uint8).tolist() == data.tolist()
    assert len(head) % 64 == 0


def test_a_frame_of_a_large_tensor_takes_no_memory() -> None:
    head, tail = frame(torch.float32, (3, 2**30))  # 12 GiB, past the sizes of the plain zip format
    assert len(head) + len(tail) < 4096


def _save(root: str, mesh_name: str) -> dict[str, torch.Tensor]:
    run_ = start(mesh_name)
    run_.train(2)
    with AsyncCheckpointer(root) as checkpointer:
        checkpointer.save(2, run_.state)
    return full_tensors(run_.state)


def _load_sharded(root: str, want: dict[str, torch.Tensor]) -> None:
    run_ = start("dp2", seed=1)
    model = run_.state["model"]
    dcp.load({"model": model}, checkpoint_id=f"{root}/step-2")
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(whole, want[f"model.{name}"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("mesh_name", ["1", "dp2 x tp2"])
def test_dcp_reads_every_tensor(mesh_name: str, tmp_path: Path) -> None:
    ranks = 4 if "tp" in mesh_name else 1
    want = run(_save, ranks, str(tmp_path), mesh_name)[0]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert all(torch.equal(loaded[name], want[name]) for name in want)
    dcp_to_torch_save(tmp_path / "step-2", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(torch.equal(whole[name], want[name]) for name in want)
    run(_load_sharded, 2, str(tmp_path), want)


@distributed(world_size=2)
def test_a_state_can_be_saved_by_dcp_as_well(tmp_path: Path) -> None:
    """train_state is a plain dict of Stateful, nothing of ours."""
    mesh = ptx.build_mesh(device_type="cpu")
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    fully_shard(model, mesh=ptx.fsdp_mesh(mesh))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    state = {k: v for k, v in ptx.ckpt.train_state(model, optimizer).items() if k != "rng"}
    want = model.weight.full_tensor()
    dcp.save(state, checkpoint_id=tmp_path)
    with torch.no_grad():
        model.weight.zero_()
    optimizer.param_groups[0]["lr"] = 9.0
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(model.weight.full_tensor(), want)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert dist.get_world_size() == 2
