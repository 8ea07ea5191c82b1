"""Cross-entropy of logits that exist already, with little memory beside them."""

from __future__ import annotations

from torch import Tensor

from ptx.loss._column_ce import column_ce
from ptx.loss._logits import flat_logits
from ptx.loss._options import LossOptions, Reduction, chunk_errors


def chunked_ce(
    logits: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """`cross_entropy` a few rows at a time, forward and backward.

    For logits that a model insists on making; if it needn't, `fused_linear_ce` doesn't make them.

    **You shift the labels**: logits at position t are compared with labels at position t.

    Args:
        logits: [..., V], any float dtype. Plain; or a DTensor: ``Replicate()``, or on a 1-D mesh
            ``Shard(-1)``.
        labels: [...], any integer dtype: ids in [0, V) or ``ignore_index``. Plain, or a replicated
            DTensor; equal on every rank of the logits' mesh.
        chunk_tokens: The most rows to work on at a time; None: as many as are fast (on CPU, as fit
            in its cache). More than that is never used.
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

    Cost: keeps the logits for the backward and nothing else of their size. The backward allocates
    their gradient, in their dtype; all else is a few float32 tensors [chunk, V]. Sharded logits:
    the one collective of `vocab_parallel_ce`. Inside ``torch.compile`` rows aren't split.
    """
    where = "chunked_ce"
    options = LossOptions(
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale
    ).checked(where, chunk_errors(chunk_tokens))
    given = flat_logits(logits, labels, vocab_size, ignore_index, where)
    loss = column_ce(given, options, most_rows=chunk_tokens, keep_exps=False)
    return loss.reshape(given.shape) if reduction == "none" else loss
