"""Log-probability of each label, and the entropy around it, without the logits of all tokens."""

from __future__ import annotations

from math import inf
from typing import Literal, overload

from torch import Tensor, nn

from ptx.loss._arguments import flag_errors
from ptx.loss._head_inputs import open_head
from ptx.loss._one_break import eager_if_gathered
from ptx.loss._options import LossOptions, is_number
from ptx.loss._per_token import per_token


@overload
def token_logprobs(
    hidden: Tensor,
    head: Tensor | nn.Module,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
    entropy: Literal[False] = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor: ...


@overload
def token_logprobs(
    hidden: Tensor,
    head: Tensor | nn.Module,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
    entropy: Literal[True],
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]: ...


@eager_if_gathered
def token_logprobs(
    hidden: Tensor,
    head: Tensor | nn.Module,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of every label under ``softmax(hidden @ weight.T (+ bias))``.

    For losses of reinforcement learning, whose weight per token isn't known beforehand::

        logprobs, entropy = token_logprobs(hidden, model.output, labels, entropy=True)
        ratio = (logprobs - old_logprobs).exp()

    **You shift the labels**: hidden states at position t are compared with labels at position t.

    Args:
        hidden: [..., H], as `fused_linear_ce` takes it.
        head: The weight [V, H] or the ``nn.Linear`` that holds it, as `fused_linear_ce` takes it.
        labels: [...], any integer dtype: ids in [0, V) or ``ignore_index``. Plain, or a replicated
            DTensor; equal on every rank of the tp mesh.
        bias: [V], placed as the weight is. Not with a module, which has its own.
        vocab_size: Number of real classes, if the last rows of the weight are padding (no
            probability, no gradient); None: all V.
        chunk_tokens: How many tokens' logits exist at a time; None: about as many as make them as
            large as the weight (on each rank of a tp mesh as the whole weight).
        temperature: Divides the logits last, after ``softcap``.
        entropy: Whether to return the entropy too.
        ignore_index: Label of positions that are left out.
        softcap: Replace logits a by softcap * tanh(a / softcap), after ``logit_scale``.
        logit_scale: Multiplies the logits first.

    Returns:
        Plain float32 log-probabilities (float64 for float64 logits) in the shape of ``labels``, 0
        where ignored; bit-equal on every rank of the tp mesh. With ``entropy`` a pair of it and the
        entropy, -sum(p * log p) over the V classes in nats, in the same form. Both are
        differentiable, with any gradient per token.

    Raises:
        ValueError: As `fused_linear_ce`.

    Cost: memory of one chunk of logits in the dtype of the matmul, plus, in the backward, the
    gradients; for bfloat16 also the weight's in float32 if there is more than one chunk. One matmul
    of 2 N H V forward; backward 3, or 2 if one side is frozen. On CPU ignored positions cost
    nothing. Under tensor parallelism one all-gather of [3, N] float32, [4, N] with ``entropy``; in
    the backward one all-reduce of the hidden state's gradient, or, if it is sharded, an all-gather
    before and a reduce-scatter.

    Source: PPO, arXiv:1707.06347, and GRPO, arXiv:2402.03300 (what it is for); memory as in Cut
    Cross-Entropy, arXiv:2411.09009.
    """
    where = "token_logprobs"
    wrong = []
    if not (is_number(temperature) and 0 < temperature < inf):
        wrong.append(f"temperature={temperature!r} must be a finite number > 0")
        temperature = 1.0
    wrong += flag_errors("entropy", entropy)
    LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale).checked(where, wrong)
    # softcap(a) / T is the cap softcap / T of a / T.
    options = LossOptions(
        ignore_index,
        reduction="none",
        softcap=None if softcap is None else softcap / temperature,
        logit_scale=logit_scale / temperature,
    )
    given = open_head(
        hidden,
        head,
        labels,
        bias=bias,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        options=options,
        where=where,
        entropy=entropy,
    )
    losses, entropies = per_token(given)
    if entropies is None:
        given.close(losses)
        return -losses.reshape(given.shape)
    given.close(losses, entropies)
    return -losses.reshape(given.shape), entropies.reshape(given.shape)
