"""Cross-entropy of logits whose columns are split over ranks, in one small collective."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ptx.loss._arguments import mesh_errors, require_tensors, size_errors
from ptx.loss._column_ce import column_ce
from ptx.loss._column_stats import real_columns
from ptx.loss._labels import flat_labels, require_classes
from ptx.loss._logits import FlatLogits, shards_columns
from ptx.loss._options import LossOptions, Reduction


def vocab_parallel_ce(
    logits: Tensor,
    labels: Tensor,
    mesh: DeviceMesh,
    *,
    vocab_size: int,
    padded_size: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Cross-entropy from each rank's slice of the logits, without gathering them.

    **You shift the labels**: logits at position t are compared with labels at position t.

    Args:
        logits: [..., V_local], any float dtype. This rank's columns, in torch chunk order
            (ceil(V / ranks) each, the last ranks fewer or none); or a DTensor ``Shard(-1)`` over
            ``mesh``.
        labels: [...], any integer dtype: global ids in [0, V) or ``ignore_index``. Plain, or a
            replicated DTensor; equal on every rank.
        mesh: 1-D mesh the vocabulary is split over, e.g. ``mesh["tp"]``.
        vocab_size: V, the number of real classes.
        padded_size: Columns summed over ranks, if the vocabulary is padded; the last
            ``padded_size - vocab_size`` get no probability and no gradient.
        ignore_index: Label whose positions add neither loss nor gradient.
        reduction: "mean" divides by the number of kept labels; "sum" doesn't divide; "none" gives
            [...], 0 where ignored.
        label_smoothing: Share of the target that is spread over all V classes (torch's convention).
        z_loss: Weight of lse**2, reduced like the cross-entropy.
        softcap: Replace logits a by softcap * tanh(a / softcap), after ``logit_scale``.
        logit_scale: Multiplies the logits first; 1 / temperature.

    Returns:
        Plain float32 loss (float64 for float64 logits), bit-equal on every rank; ``backward`` gives
        the gradient of this rank's columns.

    Raises:
        ValueError: A label out of range (on accelerators: a device-side assertion, without a sync),
            shapes that disagree, V_local that isn't this rank's share, an option out of its range.
            Before any collective; labels are equal on every rank, so all ranks raise together.

    Cost: forward one all-gather of [3, N] float32 (N labels; [4, N] with label_smoothing), backward
    none. Keeps the logits for the backward; the one allocation of their size is their gradient,
    made in the forward for float32 (it holds the exponentials until then), else in the backward.

    Source: Megatron-LM, arXiv:1909.08053, section 3 (parallel cross-entropy); partial softmaxes are
    merged as in online softmax, arXiv:1805.02867.
    """
    where = "vocab_parallel_ce"
    options = LossOptions(
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale
    ).checked(where)
    columns = vocab_size if padded_size is None else padded_size
    require_tensors(where, logits=logits, labels=labels)
    logits = _local_logits(logits, mesh, vocab_size, columns)
    shape = logits.shape[:-1]
    target = flat_labels(labels, shape, where)
    require_classes(target, vocab_size, ignore_index, where)
    # Not -1 for the rows: a rank may hold no column at all.
    flat = logits.reshape(target.numel(), logits.shape[-1])
    loss = column_ce(FlatLogits(flat, target, mesh, vocab_size, columns, shape), options)
    return loss.reshape(shape) if reduction == "none" else loss


def _local_logits(logits: Tensor, mesh: DeviceMesh, vocab_size: int, columns: int) -> Tensor:
    where, wrong = "vocab_parallel_ce", []
    if isinstance(logits, DTensor):
        if logits.device_mesh != mesh or not shards_columns(logits):
            raise ValueError(
                f"{where}: logits are a DTensor with placements {logits.placements} over"
                f" {logits.device_mesh}; they must be Shard(-1) over {mesh}, or this rank's plain"
                " columns"
            )
        logits = logits.to_local()
    if not logits.is_floating_point():
        wrong.append(f"logits are {logits.dtype}, they must be floating point")
    sizes = size_errors("padded_size", columns)
    wrong += sizes or size_errors("vocab_size", vocab_size, columns, "padded_size")
    wrong += mesh_errors(mesh, "1-D: pass mesh['tp']")
    if not wrong:
        share = real_columns(mesh.size(), columns, columns)[mesh.get_local_rank()]
        if logits.ndim == 0 or logits.shape[-1] != share:
            wrong.append(
                f"logits {tuple(logits.shape)} must have {share} columns on this rank, its share of"
                f" {columns} over {mesh.size()} ranks in torch chunk order; pass padded_size if the"
                " vocabulary is padded"
            )
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}")
    return logits
