"""Checkpoints against their floors: memcpy, write + fsync, read. Two ranks, 800 MB of state on each."""

import os
import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import harness
import ptx
from ptx.ckpt._parts import local_part

WIDTH, DEPTH, ROUNDS = 2048, 32, 9  # 806 MB of parameters and moments a rank
STEPS = 4

pytestmark = pytest.mark.bench


def build():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    mesh = ptx.fsdp_mesh(ptx.build_mesh(device_type="cpu"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    tokens = torch.randn(8, WIDTH)

    def step():
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def local_tensors(model, optimizer):
    states = [t for state in optimizer.state.values() for t in state.values()]
    return [local_part(t) for t in [*model.parameters(), *states]]


def timed(call):
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _measure(root):
    model, optimizer, step = build()
    state = ptx.ckpt.train_state(model, optimizer)
    tensors = local_tensors(model, optimizer)
    copies = [torch.zeros_like(t) for t in tensors]
    nbytes = sum(t.nbytes for t in tensors)
    plain = bytearray(nbytes)
    rank = dist.get_rank()
    found = {"stall": [], "durable": [], "load": []}

    def memcpy():
        for target, source in zip(copies, tensors):
            target.copy_(source)

    def write():
        fd = os.open(f"{root}/plain-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        view = memoryview(plain)
        while view:
            view = view[os.write(fd, view[: 4 * 2**20]) :]
        os.fsync(fd)
        os.close(fd)

    def read():
        fd, at = os.open(f"{root}/plain-{rank}", os.O_RDONLY), 0
        while at < nbytes:
            at += os.preadv(fd, [memoryview(plain)[at : at + 4 * 2**20]], at)
        os.close(fd)

    with ptx.ckpt.AsyncCheckpointer(f"{root}/steps", keep=1) as checkpointer:
        for i in range(2 + ROUNDS):
            floors = [timed(memcpy), timed(write)]
            dist.barrier()
            start = time.perf_counter()
            handle = checkpointer.save(i, state)
            stall = time.perf_counter() - start
            handle.wait()
            durable = time.perf_counter() - start
            while (
                sum(f.is_dir() for f in os.scandir(f"{root}/steps")) > 1
            ):  # the older step is being deleted
                time.sleep(0.01)
            floors.append(timed(read))
            load = timed(lambda: checkpointer.load(state))
            if i >= 2:
                for key, seconds, floor in zip(found, (stall, durable, load), floors):
                    found[key].append((seconds / floor, seconds, floor))
        memory = sum(slot.size for slot in checkpointer._flight.slots) / nbytes

        dist.barrier()
        paces = {"alone": [], "while writing": []}
        for i in range(100, 100 + ROUNDS):
            paces["alone"].append(timed(lambda: [step() for _ in range(STEPS)]))
            checkpointer.save(i, state)

            def some_steps():
                for _ in range(STEPS):
                    step()
                    checkpointer.poll()

            paces["while writing"].append(timed(some_steps))
            checkpointer.wait()
        checkpointer.save(1000, state)
        polls = [timed(checkpointer.poll) for _ in range(200)]
        checkpointer.wait()
        idle = [timed(checkpointer.poll) for _ in range(200)]
    ratios = {key: tuple(map(statistics.median, zip(*rows))) for key, rows in found.items()}
    slow = statistics.median(
        busy / alone for busy, alone in zip(paces["while writing"], paces["alone"])
    )
    return nbytes, ratios, memory, slow, statistics.median(polls), statistics.median(idle)


@pytest.mark.timeout(1200)
def test_saves_and_loads_are_near_their_floors(tmp_path):
    answers = harness.run(_measure, 2, str(tmp_path), timeout=1100)
    nbytes, _, memory, *_ = answers[0]
    print(f"\n2 ranks, {nbytes / 1e6:.0f} MB of state each; medians of {ROUNDS}, the slower rank")
    floors = {"stall": "memcpy", "durable": "write + fsync", "load": "read"}
    ratios = {}
    for key, floor in floors.items():
        ratios[key], seconds, least = max(answer[1][key] for answer in answers)
        print(f"{key} / {floor}: {ratios[key]:.2f} ({seconds * 1e3:.0f} / {least * 1e3:.0f} ms)")
    slow, poll, idle = (max(answer[i] for answer in answers) for i in (3, 4, 5))
    print(f"memory / state: {memory:.2f} (2 slots); steps while writing / alone: {slow:.2f}")
    print(f"poll in flight {poll * 1e6:.0f} us, idle {idle * 1e6:.0f} us")
    assert ratios["stall"] <= 1.3
    assert ratios["durable"] <= 1.25
    assert ratios["load"] <= 2.0
    assert memory <= 2.05
