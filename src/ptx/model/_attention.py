"""Grouped-query attention around a replaceable core."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ptx.model._args import ModelArgs
from ptx.model._init import uninitialised
from ptx.model._mask import MaskInfo
from ptx.model._norm import RMSNorm
from ptx.model._rope import Rope, apply_rope


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v without a parameter: the seam where attention is replaced.

    Context parallelism puts a module with the same call in its place.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskInfo) -> Tensor:
        """Attends within the sequence given.

        Args:
            q: [B, heads, S, head_dim].
            k: [B, kv heads, S, head_dim]; kv heads divides heads. Counts are this rank's under TP.
            v: Like k.
            mask: Which keys a query sees.

        Returns:
            [B, heads, S, head_dim].

        Raises:
            ValueError: The mask is needed, but wasn't built.
        """
        if mask.is_causal:
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if mask.dense is None:
            raise ValueError(
                f"AttentionCore: documents or window={mask.window} need a mask, but dense masks are"
                " off; set `dense_masks = True` on the Transformer, or use a core that masks itself"
            )
        # With a mask, CUDA's fused kernels want equal head counts; the fallback stores all scores.
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense)


class Attention(nn.Module):
    """Projections, optional norm per head, RoPE, core, output projection.

    The forward reads head counts from the projections' outputs, so it is the same code when a
    tensor parallel plan leaves this rank with some of the heads.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_width = args.head_width
        q_width, kv_width = args.n_heads * args.head_width, args.kv_heads * args.head_width
        self.wq = uninitialised(nn.Linear, args.dim, q_width, bias=args.qkv_bias)
        self.wk = uninitialised(nn.Linear, args.dim, kv_width, bias=args.qkv_bias)
        self.wv = uninitialised(nn.Linear, args.dim, kv_width, bias=args.qkv_bias)
        self.wo = uninitialised(nn.Linear, q_width, args.dim, bias=args.o_bias)
        self.q_norm = RMSNorm(args.head_width, eps=args.norm_eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_width, eps=args.norm_eps) if args.qk_norm else None
        self.core = AttentionCore()

    def forward(self, x: Tensor, rope: Rope | None, mask: MaskInfo) -> Tensor:
        """[B, S, dim] -> [B, S, dim].

        Raises:
            ValueError: The projections' sequence isn't as long as the one rope and mask were made
                for.
        """
        # Shapes are q's: under sequence parallel x may be a DTensor or one rank's part.
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        seq_len = q.shape[1]
        if seq_len != mask.seq_len:
            raise ValueError(
                f"Attention: the sequence has {seq_len} positions, rope and mask were made for"
                f" {mask.seq_len}; under sequence parallel a block takes this rank's part of the"
                " hidden states (call the whole model, or split them first)"
            )
        # unflatten, as a view couldn't infer the heads of an empty batch
        q = q.unflatten(-1, (-1, self.head_width))
        k = k.unflatten(-1, (-1, self.head_width))
        v = v.unflatten(-1, (-1, self.head_width))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
