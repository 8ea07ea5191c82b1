"""Cross-entropy of logits as they come out of a model: plain, or a DTensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ptx.loss._column_ce import column_ce
from ptx.loss._logits import flat_logits
from ptx.loss._options import LossOptions, Reduction, reduce_tokens, shape_logits


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Cross-entropy of ``logits``, whatever `apply_tp` made of them.

    On plain float32 logits, loss and gradient are those of ``F.cross_entropy`` bit for bit, but a
    batch without a single kept label gives 0 (and zero gradients) instead of NaN. Logits that
    tensor parallelism left sharded over the vocabulary go the way of `vocab_parallel_ce`.

    **You shift the labels**: logits at position t are compared with labels at position t.

    Args:
        logits: [..., V], any float dtype. Plain; or a DTensor: ``Replicate()``, or on a 1-D mesh
            ``Shard(-1)``.
        labels: [...], any integer dtype: ids in [0, V) or ``ignore_index``. Plain, or a replicated
            DTensor; equal on every rank of the logits' mesh.
        vocab_size: Number of real classes, if the last columns are padding (no probability, no
            gradient); None: all V.
        ignore_index: Label whose positions add neither loss nor gradient.
        reduction: "mean" divides by the number of kept labels; "sum" doesn't divide; "none" gives
            [...], 0 where ignored.
        label_smoothing: Share of the target that is spread over all V classes (torch's convention).
        z_loss: Weight of lse**2, reduced like the cross-entropy.
        softcap: Replace logits a by softcap * tanh(a / softcap), after ``logit_scale``.
        logit_scale: Multiplies the logits first; 1 / temperature.

    Returns:
        Plain float32 loss (float64 for float64 logits), equal on every rank of the logits' mesh.

    Raises:
        ValueError: A label out of range (on accelerators: a device-side assertion, without a sync),
            shapes that disagree, another sharding, an option out of its range. Before any
            collective.

    Cost: plain logits as ``F.cross_entropy``, about three float32 copies of them at the peak;
    sharded ones as `vocab_parallel_ce`, with its one collective.
    """
    where = "cross_entropy"
    options = LossOptions(
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale
    ).checked(where)
    given = flat_logits(logits, labels, vocab_size, ignore_index, where)
    if given.mesh is None:
        loss = _plain(given.logits[:, : given.vocab_size], given.labels, options)
    else:
        loss = column_ce(given, options)
    return loss.reshape(given.shape) if reduction == "none" else loss


def _plain(logits: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    x = shape_logits(logits, options)
    ignored = labels == options.ignore_index
    loss = F.cross_entropy(
        x,
        labels,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    if options.reduction == "mean":
        loss = loss.masked_fill(ignored.all(), 0.0)  # 0 / 0 so far; N = 0 counts as all ignored
    if options.z_loss:
        # float32 can't hold a small log beside a large maximum, and the gradient needs the log.
        top = x.detach().amax(dim=-1, keepdim=True)
        lse = torch.logsumexp(x - top, dim=-1) + top[:, 0]
        squares = lse.square().masked_fill(ignored, 0.0)
        loss = loss + options.z_loss * reduce_tokens(squares, labels, options)
    return loss
