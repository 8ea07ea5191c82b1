"""Several ranks: they raise together, agree without waiting, and each keeps what is its own."""

from __future__ import annotations

import logging
import os
import resource
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ptx
from ckpt.small import Small, listed, save_filled, stopped_writer, writer_pid
from ckpt.training import start
from collectives import CollectiveLog
from harness import distributed, run
from ptx.ckpt import AsyncCheckpointer, PerRank, train_state, verify

SOON = 20.0  # seconds, on a machine that has other things to do; group timeouts are longer


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def error_of(call: Any) -> str:
    """What a call raises on each rank: the same, and soon."""
    begin = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    assert time.monotonic() - begin < SOON
    texts = everywhere(f"{type(caught.value).__name__}: {caught.value}")
    assert len(set(texts)) == 1, texts
    return texts[0]


@distributed(world_size=2)
def test_all_ranks_raise_at_once_and_the_next_save_is_fine(tmp_path: Path) -> None:
    small, rank = Small(), dist.get_rank()
    model = nn.BatchNorm1d(2)
    bad_state = {**small.state, "x": _Fixed({"f": open if rank else 1})}
    with AsyncCheckpointer(tmp_path) as c:
        text = error_of(lambda: c.save(1, small.state, meta={"a": object() if rank else 1}))
        assert text == (
            "ValueError: rank 1: save: 'meta.a' is a builtins.object, which would have to be pickled;"
            " return numbers, strings, lists, dicts or tensors from state_dict()"
        )
        assert "rank 1: save: 'x.f' is a" in error_of(lambda: c.save(1, bad_state))
        assert "different steps, [1, 2]" in error_of(lambda: c.save(1 + rank, small.state))
        differing = {**small.state, "x": _Fixed({"n": rank})}
        assert "'x' differs between rank 0 and rank 1" in error_of(lambda: c.save(1, differing))
        differing = {**small.state, "x": _Fixed({"n": torch.tensor([0, rank])})}
        assert "x=PerRank(...)" in error_of(lambda: c.save(1, differing))
        model.running_mean.fill_(rank)  # each rank has seen other data
        assert "'model.running_mean' differs between ranks 0 and 1" in error_of(
            lambda: c.save(1, train_state(model))
        )
        keys = {**small.state, **({"y": _Fixed({})} if rank else {})}
        assert "'y' differs" in error_of(lambda: c.save(1, keys))
        shapes = train_state(nn.Linear(2, 2 + rank))
        assert "'model.weight' is torch.float32 (2, 2)" in error_of(lambda: c.save(1, shapes))
        assert listed(tmp_path) == []
        save_filled(c, small, 1)
        assert c.load(small.state) == 1
        text = error_of(lambda: c.load({"x": 3} if rank else small.state))
        assert "rank 1: load: 'x' is a int" in text
        assert "no step 5" in error_of(lambda: c.load(small.state, step=5))


class _Fixed:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.state = state


@distributed(world_size=2)
def test_a_failure_in_the_background_is_seen_by_all_ranks_in_the_same_poll(tmp_path: Path) -> None:
    small, rank = Small(), dist.get_rank()
    with AsyncCheckpointer(tmp_path, keep=1) as c:
        save_filled(c, small, 1)
        if rank == 1:
            os.kill(writer_pid(c), signal.SIGSTOP)
        handle = c.save(2, small.state)
        assert handle is not None
        for _ in range(3):
            c.poll()
        time.sleep(0.3)  # rank 0's part is durable, and waits for that of rank 1
        if rank == 1:
            os.kill(writer_pid(c), signal.SIGKILL)
            c._flight._writer._process.wait(SOON)
        dist.barrier()
        c.poll()  # notices, and tells the others; the next one hears of it
        with pytest.raises(RuntimeError, match="step 2 failed: rank 1: the writer process died"):
            c.poll()
        with pytest.raises(RuntimeError, match="step 2 failed"):
            handle.wait()
        assert c.latest() == 1  # retention has not begun
        save_filled(c, small, 3)
        _eventually(lambda: c.steps() == [3])
        assert verify(tmp_path).ok


@distributed(world_size=2)
def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_no_files(tmp_path: Path) -> None:
    small = Small(size=200)
    with AsyncCheckpointer(tmp_path) as c:
        save_filled(c, small, 1)
        if dist.get_rank() == 1:
            resource.prlimit(writer_pid(c), resource.RLIMIT_FSIZE, (10_000, 10_000))
        small.fill(2.0)
        c.save(2, small.state)
        assert "rank 1: OSError: [Errno 27] File too large" in error_of(c.wait)
        dist.barrier()
        _eventually(lambda: listed(tmp_path) == ["step-1"])
        assert c.load(small.state) == 1
        assert small.values() == {1.0}


@distributed(world_size=2)
def test_a_vanished_folder_raises_on_all_ranks(tmp_path: Path) -> None:
    small, root = Small(), tmp_path / "root"
    with AsyncCheckpointer(root) as c:
        save_filled(c, small, 1)
        with stopped_writer(c):
            c.save(2, small.state)
            dist.barrier()
            if dist.get_rank() == 0:
                root.rename(tmp_path / "away")
            dist.barrier()
        assert "the folder is gone" in error_of(c.wait)
        assert "No such file" in error_of(lambda: c.save(3, small.state))
        dist.barrier()
        if dist.get_rank() == 0:
            (tmp_path / "away").rename(root)
        save_filled(c, small, 4)
        assert c.load(small.state, step=1) == 1


def test_a_read_only_directory_is_refused_on_all_ranks() -> None:
    with tempfile.TemporaryDirectory() as root:
        with AsyncCheckpointer(root) as checkpointer:
            save_filled(checkpointer, Small(), 1)
        Path(root).chmod(0o555)
        run(_read_only, 2, root)
        Path(root).chmod(0o755)


def _read_only(root: str) -> None:
    small, group = Small(), dist.new_group(backend="gloo")
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write anywhere
    with AsyncCheckpointer(root, process_group=group) as c:
        assert c.load(small.state) == 1
        assert "Permission denied" in error_of(lambda: c.save(2, small.state))


@distributed(world_size=2)
def test_a_root_that_ranks_do_not_share_is_noticed_at_construction(tmp_path: Path) -> None:
    from ptx.ckpt import _root

    _root.LAG_SECONDS = 0.3
    root = tmp_path / str(dist.get_rank())
    text = error_of(lambda: AsyncCheckpointer(root))
    assert f"rank 1: AsyncCheckpointer: {tmp_path}/1 isn't the folder that rank 0 has" in text
    assert os.listdir(tmp_path) == ["0"]
    assert os.listdir(tmp_path / "0") == []
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "file").touch()
    dist.barrier()
    assert "File exists" in error_of(lambda: AsyncCheckpointer(tmp_path / "file"))


@distributed(world_size=2)
def test_nothing_collective_but_on_a_group_of_its_own(tmp_path: Path) -> None:
    """Training goes on with collectives of its own while a save is in flight."""
    small, given = Small(), dist.new_group(backend="gloo")
    for group in (None, given):
        with AsyncCheckpointer(tmp_path, process_group=group) as c:
            assert c._ranks.group is not dist.group.WORLD
            assert (c._ranks.group is given) == (group is given)
            total = torch.zeros(1)
            for step in range(4):
                c.save(step, small.state)
                for _ in range(3):
                    dist.all_reduce(total + 1)
                    c.poll()
    dist.barrier(given)  # not ours to destroy


@distributed(world_size=2)
def test_an_idle_poll_does_not_communicate(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as c, CollectiveLog() as log:
        c.poll()
        c.wait()
        assert log.count() == 0
        c.save(1, small.state)
        c.wait()
        log.calls.clear()
        c.poll()
        c.wait()
        assert log.count() == 0


@distributed(world_size=2)
def test_a_save_is_skipped_on_all_ranks_if_one_is_busy(tmp_path: Path) -> None:
    small, rank = Small(), dist.get_rank()
    with AsyncCheckpointer(tmp_path, slots=1, on_busy="skip") as c:
        save_filled(c, small, 1)
        if rank == 1:
            os.kill(writer_pid(c), signal.SIGSTOP)
        assert c.save(2, small.state) is not None
        time.sleep(0.3)
        assert c.save(3, small.state) is None
        if rank == 1:
            os.kill(writer_pid(c), signal.SIGCONT)
        c.wait()
        assert c.save(4, small.state, block=True) is not None
    assert verify(tmp_path).steps == (1, 2, 4)


@distributed(world_size=2)
def test_damage_in_the_file_of_one_rank_sends_all_to_the_older_step(tmp_path: Path) -> None:
    from ckpt.small import data_files, flip

    torch.manual_seed(0)
    mesh = ptx.build_mesh(device_type="cpu")
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=ptx.fsdp_mesh(mesh))
    state = train_state(model)
    with AsyncCheckpointer(tmp_path) as c:
        for step in (1, 2):
            with torch.no_grad():
                model.weight.fill_(step)
            c.save(step, state, block=True)
        if dist.get_rank() == 0:
            flip(data_files(tmp_path, 2)[1], 2000)
        dist.barrier()
        with torch.no_grad():
            model.weight.fill_(9.0)
        records = _logged(lambda: c.load(state))
        assert len(records) == (1 if dist.get_rank() == 0 else 0)
        assert all("step 2 is damaged: " in r and "rank-00001.distcp, byte 0" in r for r in records)
        assert model.weight.full_tensor().unique().tolist() == [1.0]
        with torch.no_grad():
            model.weight.fill_(9.0)
        assert "it doesn't verify" in error_of(lambda: c.load(state, step=2))
        assert model.weight.full_tensor().unique().tolist() == [9.0]  # not written


def _logged(call: Any) -> list[str]:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep()
    logging.getLogger("ptx.ckpt").addHandler(handler)
    call()
    logging.getLogger("ptx.ckpt").removeHandler(handler)
    return found


class Loader:
    """One per data rank: reads every n-th sample of an endless stream over 5 samples, and buffers."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.position, self.stride = rank, ranks

    def __next__(self) -> tuple[int, int]:
        epoch, sample = divmod(self.position, 5)
        self.position += self.stride
        return epoch, sample

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int], /) -> None:
        self.position = state["position"]


@distributed(world_size=1)
def test_D01_the_position_survives_the_end_of_an_epoch(tmp_path: Path) -> None:
    data, resumed = Loader(0, 1), Loader(0, 1)
    for _ in range(7):
        next(data)
    with AsyncCheckpointer(tmp_path) as c:
        c.save(7, {"data": data}, block=True)
        c.load({"data": resumed})
    assert next(resumed) == (1, 2)
    next(data)
    assert [next(resumed) for _ in range(10)] == [next(data) for _ in range(10)]


@distributed(world_size=2)
def test_D07_each_rank_gets_its_own_loader_state_back(tmp_path: Path) -> None:
    rank = dist.get_rank()
    data, resumed = Loader(rank, 2), Loader(rank, 2)
    before = [next(data) for _ in range(4)]
    with AsyncCheckpointer(tmp_path) as c:
        text = error_of(lambda: c.save(4, {"data": data}))
        assert "pass data=PerRank(...)" in text
        c.save(4, {"data": PerRank(data)}, block=True)
        c.load({"data": PerRank(resumed)})
    after = [next(resumed) for _ in range(4)]
    assert after == [next(data) for _ in range(4)]
    ids = [one for some in everywhere(before + after) for one in some]
    assert len(set(ids)) == 16


def test_state_of_a_rank_is_refused_on_another_mesh(tmp_path: Path) -> None:
    run(_save_per_rank, 2, str(tmp_path))
    run(_load_per_rank, 1, str(tmp_path), {"dp_shard": 1})
    run(_load_per_rank, 2, str(tmp_path), {"dp_shard": 1, "tp": 2})  # as many ranks, other ones


def _per_rank_state(sizes: dict[str, int], value: Any) -> dict[str, Any]:
    mesh = ptx.build_mesh(**sizes, device_type="cpu")
    torch.manual_seed(0)
    model = ptx.Transformer(
        ptx.ModelArgs(vocab_size=8, dim=8, n_layers=1, n_heads=2, max_seq_len=8)
    )
    ptx.apply_tp(model, mesh["tp"])
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    return train_state(model, mine=PerRank(value))


def _save_per_rank(root: str) -> None:
    with AsyncCheckpointer(root) as c:
        c.save(0, _per_rank_state({"dp_shard": 2}, [dist.get_rank()]))


def _load_per_rank(root: str, sizes: dict[str, int]) -> None:
    mine = ["as it was"]
    state = _per_rank_state(sizes, mine)
    with AsyncCheckpointer(root) as c:
        with pytest.raises(
            ValueError, match="'mine' differs by rank and was saved on another mesh"
        ):
            c.load(state)
        c.load(state, allow_missing=["mine"])
    assert mine == ["as it was"]


def _draw_after(mesh_name: str, root: str, save: bool) -> Any:
    run_ = start(mesh_name)
    torch.manual_seed(100 + dist.get_rank())
    with AsyncCheckpointer(root) as c:
        if save:
            c.save(3, run_.state, block=True)
            return torch.rand(2).tolist(), []
        torch.manual_seed(0)
        logged = _logged(lambda: c.load(run_.state))
    return torch.rand(2).tolist(), logged


def test_random_states_are_restored_on_the_same_mesh_and_derived_on_another(tmp_path: Path) -> None:
    root = str(tmp_path)
    saved = [draws for draws, _ in run(_draw_after, 2, "dp2", root, True)]
    same = run(_draw_after, 2, "dp2", root, False)
    assert [draws for draws, _ in same] == saved
    assert not any(logged for _, logged in same)
    other = run(_draw_after, 4, "dp2 x tp2", root, False)
    draws = [tuple(one) for one, _ in other]
    assert draws[0] == draws[1] != draws[2] == draws[3]  # equal over tp, distinct over dp
    assert set(draws).isdisjoint(map(tuple, saved))
    (text,) = other[0][1]
    assert text.startswith("step 3: 'rng' was saved on another mesh; seeded anew")
    assert not other[1][1]


@distributed(world_size=4)
def test_replicas_share_the_bytes_out_evenly(tmp_path: Path) -> None:
    mesh = ptx.build_mesh(dp_replicate=2, dp_shard=2, device_type="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    for layer in model:
        fully_shard(layer, mesh=ptx.fsdp_mesh(mesh))
    plain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    for name, one in (("hsdp", model), ("plain", plain)):
        with AsyncCheckpointer(tmp_path / name) as c:
            c.save(0, {"model": train_state(one)["model"]}, block=True)
            mine = c._layout.data_bytes
        whole = sum(p.numel() * 4 for p in one.parameters())
        assert mine < 1.15 * whole / 4 + 3000 * len(c._layout.pieces)
        assert len(c._layout.pieces) in range(3, 10)


@distributed(world_size=4)
def test_C14_placements_do_not_matter(tmp_path: Path) -> None:
    world = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = world["dp", "tp"]._flatten("line")
    whole = torch.arange(21.0).view(7, 3)
    layouts: list[tuple[Any, list[Any]]] = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),  # 3 columns over 4 ranks: one is empty
        (world, [Replicate(), Shard(0)]),
        (world, [Shard(1), Shard(0)]),
        (world, [Shard(0), Shard(0)]),
        (world, [Replicate(), Replicate()]),
    ]
    for i, (mesh, placements) in enumerate(layouts):
        saved = {"x": distribute_tensor(whole, mesh, placements)}
        with AsyncCheckpointer(tmp_path / str(i)) as c:
            c.save(0, {"s": _Fixed(saved)}, block=True)
            for to, how in layouts:
                target = _Fixed({"x": distribute_tensor(torch.zeros(7, 3), to, how)})
                c.load({"s": target})
                got = target.state["x"]
                assert isinstance(got, DTensor)
                assert list(got.placements) == how
                assert torch.equal(got.full_tensor(), whole)
            target = _Fixed({})
            c.load({"s": target})
            assert torch.equal(target.state["x"], whole)  # where nothing is known: plain


@distributed(world_size=4)
def test_C14_fsdp_of_tp_is_strided_and_loads_whole(tmp_path: Path) -> None:
    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    torch.manual_seed(0)
    for rows in (16, 13):  # the second uneven in both dims
        whole = torch.randn(rows, 3)
        model = nn.Linear(3, rows, bias=False)
        with torch.no_grad():
            model.weight.copy_(whole)
        model.weight = nn.Parameter(
            distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
        )
        fully_shard(model, mesh=ptx.fsdp_mesh(mesh))
        assert "_StridedShard" in str(model.weight.placements)
        with AsyncCheckpointer(tmp_path / str(rows)) as c:
            c.save(0, {"model": model}, block=True)
            plain = nn.Linear(3, rows, bias=False)
            c.load({"model": plain})
            assert torch.equal(plain.weight, whole)
            with torch.no_grad():
                model.weight.zero_()
            c.load({"model": model})
            assert torch.equal(model.weight.full_tensor(), whole)


@distributed(world_size=2)
def test_a_sum_not_yet_taken_is_refused(tmp_path: Path) -> None:
    mesh = ptx.build_mesh(device_type="cpu")["dp_shard"]
    partial = DTensor.from_local(torch.ones(2), mesh, [torch.distributed.tensor.Partial()])
    with AsyncCheckpointer(tmp_path) as c:
        text = error_of(lambda: c.save(0, {"x": _Fixed({"g": partial})}))
        assert "'x.g' is a sum not yet taken" in text


@distributed(world_size=1)
def test_an_optimizer_built_before_fsdp_is_refused() -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh), units=["0"])
    with pytest.raises(ValueError, match=r"4 of the 4 .* build the optimizer after .*apply_fsdp2"):
        train_state(model, optimizer)


@distributed(world_size=2)
def test_what_fsdp_left_gathered_is_neither_saved_nor_in_the_way(tmp_path: Path) -> None:
    """After a forward without a backward the root's parameters are copies, to which writes are lost."""
    mesh = ptx.build_mesh(device_type="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=ptx.fsdp_mesh(mesh), reshard_after_forward=False)
    fully_shard(model, mesh=ptx.fsdp_mesh(mesh))
    optimizer = torch.optim.AdamW(model.parameters())
    state = train_state(model, optimizer)
    with AsyncCheckpointer(tmp_path) as c:
        with torch.no_grad():
            want = model(torch.ones(1, 4))
        assert not isinstance(model[1].weight, DTensor)
        c.save(0, state, block=True)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            model(torch.ones(1, 4))
        c.load(state)
        with torch.no_grad():
            assert torch.equal(model(torch.ones(1, 4)), want)


@distributed(world_size=2)
def test_F02_a_sharded_model_on_meta_is_refused_and_loads_after_materialize(tmp_path: Path) -> None:
    mesh = ptx.fsdp_mesh(ptx.build_mesh(device_type="cpu"))
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=61,
    )
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ptx.apply_fsdp2(model, mesh)
    with AsyncCheckpointer(tmp_path) as c:
        c.save(0, train_state(plain), block=True)
        text = error_of(lambda: c.load(train_state(model)))
        assert "on meta, with no memory to load into; call materialize(model, device" in text
        ptx.materialize(model, "cpu", seed=None)
        c.load(train_state(model))
    want = dict(plain.named_buffers())
    assert len(want) > 0
    assert all(torch.equal(buffer, want[name]) for name, buffer in model.named_buffers())
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


@distributed(world_size=2)
def test_names_may_be_on_some_ranks_only(tmp_path: Path) -> None:
    """As in pipeline stages; then one process loads all of it, and each stage its own again."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    stage = nn.ModuleDict({str(i): whole[i] for i in ([0, 1] if rank == 0 else [2])})
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.5)
    for p in stage.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    optimizer.state[next(stage.parameters())]["count"] = 3 + rank  # a plain value, on one rank
    state = train_state([stage], optimizer)
    with AsyncCheckpointer(tmp_path) as c:
        c.save(0, state, block=True)
        want = [p.clone() for p in stage.parameters()]
        with torch.no_grad():
            for p in stage.parameters():
                p.zero_()
        optimizer.state.clear()
        c.load(state)
        assert all(map(torch.equal, want, stage.parameters()))
        assert optimizer.state[next(stage.parameters())]["count"] == 3 + rank
        fresh = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        other = torch.optim.AdamW(fresh.parameters())
        c.load({key: train_state(fresh, other)[key] for key in ("model", "optimizer")})
        for name in stage:
            assert torch.equal(fresh[int(name)].weight, stage[name].weight)
        assert [other.state[fresh[i].weight].get("count") for i in range(3)] == [3, None, 4]
        assert other.param_groups[0]["lr"] == 0.5


def _eventually(condition: Any, seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
