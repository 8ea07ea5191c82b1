"""What is no tensor, no number of classes, no mesh, or on another device is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness import distributed
from ptx.loss import (
    chunked_ce,
    cross_entropy,
    fused_linear_ce,
    token_logprobs,
    token_mean,
    token_scale,
    vocab_parallel_ce,
)

OVER_LOGITS = (cross_entropy, chunked_ce)
OVER_A_HEAD = (fused_linear_ce, token_logprobs)
LOGITS, HIDDEN, WEIGHT = torch.zeros(3, 7), torch.zeros(3, 5), torch.zeros(7, 5)
LABELS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize("device", ["hidden", "labels", "weight", "bias"])
def test_tensors_on_two_devices(device: str) -> None:
    """A head on meta, not materialized yet, used to give numbers out of unwritten memory."""
    given: dict[str, Any] = {
        "hidden": HIDDEN,
        "weight": WEIGHT,
        "labels": LABELS,
        "bias": torch.zeros(7),
    }
    given[device] = given[device].to("meta")
    for loss in OVER_A_HEAD:
        with pytest.raises(ValueError, match=r"on cpu.* on meta|on meta.* on cpu"):
            loss(given["hidden"], given["weight"], given["labels"], bias=given["bias"])
    for loss in OVER_LOGITS:
        with pytest.raises(ValueError, match="logits on cpu, labels on meta: they must be on one"):
            loss(LOGITS, LABELS.to("meta"))


def test_all_on_meta() -> None:
    for loss in OVER_A_HEAD:
        hidden, weight = (t.to("meta").requires_grad_() for t in (HIDDEN, WEIGHT))
        loss(hidden, weight, LABELS.to("meta")).sum().backward()
        assert hidden.grad.shape == HIDDEN.shape
        assert weight.grad.shape == WEIGHT.shape


def test_no_tensors() -> None:
    output = SimpleNamespace(logits=LOGITS)  # of a transformers model
    states = SimpleNamespace(last_hidden_state=HIDDEN)
    for loss in OVER_LOGITS:
        with pytest.raises(ValueError, match=r"logits is a SimpleNamespace.*pass its \.logits"):
            loss(output, LABELS)
        with pytest.raises(ValueError, match="labels is a list, it must be a tensor"):
            loss(LOGITS, [0, 1, 2])
    for loss in OVER_A_HEAD:
        with pytest.raises(ValueError, match=r"hidden is a .*its \.last_hidden_state; labels is a"):
            loss(states, WEIGHT, None)
        with pytest.raises(ValueError, match="bias is a bool"):
            loss(HIDDEN, WEIGHT, LABELS, bias=True)


@pytest.mark.parametrize("size", [5.0, True, "5", torch.tensor(5), 0, 8])
def test_vocab_size_is_an_int(size: Any, one_rank: DeviceMesh) -> None:
    for loss in OVER_LOGITS:
        with pytest.raises(ValueError, match="vocab_size="):
            loss(LOGITS, LABELS, vocab_size=size)
    for loss in OVER_A_HEAD:
        with pytest.raises(ValueError, match=r"vocab_size=.* an int in \[1, V=7\]"):
            loss(HIDDEN, WEIGHT, LABELS, vocab_size=size)
    with pytest.raises(ValueError, match="vocab_size="):
        vocab_parallel_ce(LOGITS, LABELS, one_rank, vocab_size=size, padded_size=7)
    if not isinstance(size, int) or size < 2:
        with pytest.raises(ValueError, match="token_scale: vocab_size="):
            token_scale(LABELS, one_rank, vocab_size=size)


def test_labels_of_inference_mode() -> None:
    with torch.inference_mode():
        labels = torch.tensor([0, 1, 2])
    for loss in OVER_LOGITS:
        loss(LOGITS.clone().requires_grad_(), labels).backward()
    for head_loss in OVER_A_HEAD:
        head_loss(HIDDEN, WEIGHT.clone().requires_grad_(), labels).sum().backward()


def test_numbers() -> None:
    with pytest.raises(ValueError, match=r"ignore_index=.*label_smoothing=True.*z_loss=True"):
        cross_entropy(LOGITS, LABELS, ignore_index=2**63, label_smoothing=True, z_loss=True)
    with pytest.raises(ValueError, match=r"temperature=True .*entropy='no'"):
        token_logprobs(HIDDEN, WEIGHT, LABELS, temperature=True, entropy="no")  # type: ignore[call-overload]


def test_token_weights(one_rank: DeviceMesh) -> None:
    for labels, options, message in (
        (None, {}, "labels are a NoneType"),
        (LABELS, {"ignore_index": None}, "ignore_index=None"),
        (LABELS, {"ignore_index": LABELS}, "ignore_index=tensor"),
        ([LABELS, LABELS.to("meta")], {}, r"labels\[0\] on cpu, labels\[1\] on meta"),
    ):
        with pytest.raises(ValueError, match=f"token_scale: {message}"):
            token_scale(labels, one_rank, **options)
    sharded = distribute_tensor(torch.ones(2), one_rank, [Shard(0)])
    for value in (sharded, None, "1", {"loss": 1.0}, (x for x in (1.0,))):
        with pytest.raises(
            ValueError, match=r"token_mean: loss_sum holds a .*, not a plain tensor"
        ):
            token_mean(value, 1, one_rank)
    with pytest.raises(ValueError, match="token_mean: the mesh is a NoneType"):
        token_mean(1.0, 1, None)  # type: ignore[arg-type]
    assert token_mean([[1.0, torch.ones(2)], 3.0], [2, [1, 1]], one_rank) == 1.5


@distributed(world_size=2)
def test_meshes_without_this_rank_and_shards_out_of_order() -> None:
    mesh = init_device_mesh("cpu", (2,))
    first = mesh.get_local_rank() == 0
    alone = DeviceMesh("cpu", [0])
    if not first:
        for call in (
            lambda: token_scale(LABELS, alone),
            lambda: token_mean(1.0, 1, alone),
            lambda: vocab_parallel_ce(LOGITS, LABELS, alone, vocab_size=7),
        ):
            with pytest.raises(ValueError, match="this rank isn't in the mesh"):
                call()
    # In torch chunk order the first rank has 4 of 7 rows; these would be other classes' rows.
    rows, columns = (WEIGHT[:3], LOGITS[:, :3]) if first else (WEIGHT[3:], LOGITS[:, 3:])
    weight = DTensor.from_local(rows, mesh, [Shard(0)], shape=(7, 5), stride=(5, 1))
    logits = DTensor.from_local(columns, mesh, [Shard(1)], shape=(3, 7), stride=(7, 1))
    for loss in OVER_A_HEAD:
        with pytest.raises(ValueError, match=r"rows of the head's weight.* over 2 ranks is"):
            loss(HIDDEN, weight, LABELS)
    for loss in OVER_LOGITS:
        with pytest.raises(ValueError, match=r"columns of the logits.* over 2 ranks is"):
            loss(logits, LABELS)
