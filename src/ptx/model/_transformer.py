"""A Llama-style decoder whose parts may be sharded, wrapped, replaced or absent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptx.model._args import ModelArgs
from ptx.model._attention import Attention
from ptx.model._init import init_parameters, uninitialised
from ptx.model._mask import MaskInfo, mask_info
from ptx.model._norm import RMSNorm
from ptx.model._rope import Rope, rope_tables


class Transformer(nn.Module):
    """Token ids to logits, or to normed hidden states.

    Any of ``tok_embeddings``, ``norm``, ``output`` may be set to None and entries of ``layers``
    deleted (a pipeline part): without the embedding the input is a hidden state, without the output
    the result is one. Names of layers are their numbers in the whole model, so they don't change in
    a part.

    The model holds no buffer. Built under ``torch.device("meta")`` it allocates nothing and draws
    nothing; `ptx.materialize` or `init_weights` after ``to_empty`` does.

    Args:
        args: The model's shape, see `ModelArgs`.

    Attributes:
        dense_masks: Whether [S, S] masks are built for documents and windows. A replacement for
            ``attention.core`` that masks by itself turns this off.
    """

    tok_embeddings: nn.Embedding
    norm: RMSNorm
    output: nn.Linear

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.dense_masks = True
        self.tok_embeddings = uninitialised(nn.Embedding, args.vocab_size, args.dim)
        # A dict, not a list: deleting a layer must not renumber the others.
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.output = uninitialised(nn.Linear, args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        if not self.tok_embeddings.weight.is_meta:
            self.init_weights()

    def init_weights(self) -> None:
        """Draws the parameters present: normal, 0.02 wide, smaller on the way to the residual.

        `ptx.model._init.init_parameters` states the distributions.
        """
        init_parameters(self, n_layers=self.args.n_layers, tied=self.args.tie_embeddings)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        return_hidden: bool = False,
    ) -> Tensor:
        """Runs the parts present. Call the model, not this method: hooks of wrappers must run.

        Attention is causal by index in the sequence, whatever ``positions`` says.

        Args:
            tokens: [B, S], int64 or int32; without an embedding a hidden state [B, S, dim] (this
                rank's part of S under sequence parallel; then pass positions).
            positions: [S] or [B, S], integers: position ids for RoPE; None: 0 to S - 1. They may
                restart at each document or not: within a document only their differences count.
            documents: [B, S], integers: a query sees keys with its own id only, so documents packed
                into one row don't see each other. Ids need no order; None: one document.
            return_hidden: Return the normed hidden state and leave the output to the caller.

        Returns:
            Logits [B, S, vocab_size] in the model's dtype, or hidden states [B, S, dim]. Under
            tensor parallelism what the plan says, a DTensor by default.

        Raises:
            ValueError: Shapes or dtypes don't fit each other, or S exceeds ``max_seq_len`` while
                positions are counted here (given ones aren't read: that would synchronise).
        """
        embedding = self._modules.get("tok_embeddings")
        seq_len = _check_inputs(self.args, tokens, positions, documents, embedding is not None)
        if positions is None:
            positions = torch.arange(seq_len, device=tokens.device)

        # Once for all layers. Which layer gets which is decided here and not by a number kept in
        # the block: compiled blocks of the same kind share one graph.
        rope = rope_tables(self.args, positions)
        windows = {int(name): self.args.window(int(name)) for name in self.layers}
        masks = {
            window: mask_info(positions, documents, window, dense=self.dense_masks)
            for window in dict.fromkeys(windows.values())
        }

        hidden = tokens if embedding is None else embedding(tokens)
        for name, block in self.layers.items():
            layer = int(name)
            layer_rope = rope if self.args.uses_rope(layer) else None
            hidden = block(hidden, layer_rope, masks[windows[layer]])

        norm, output = self._modules.get("norm"), self._modules.get("output")
        if norm is not None:
            hidden = norm(hidden)
        return hidden if return_hidden or output is None else output(hidden)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each normed before and added to the stream after."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor, rope: Rope | None, mask: MaskInfo) -> Tensor:
        """[B, S, dim] -> [B, S, dim]; under sequence parallel this rank's part of S.

        Args:
            x: The residual stream, a plain tensor.
            rope: Tables for the whole sequence, or None: no rotation.
            mask: Which keys a query sees, for the whole sequence.
        """
        x = x + self.attention(self.attention_norm(x), rope, mask)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x).

    Source: Shazeer, arXiv:2002.05202.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = uninitialised(nn.Linear, args.dim, args.ffn_width, bias=args.mlp_bias)
        self.w2 = uninitialised(nn.Linear, args.ffn_width, args.dim, bias=args.mlp_bias)
        self.w3 = uninitialised(nn.Linear, args.dim, args.ffn_width, bias=args.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


def _check_inputs(
    args: ModelArgs,
    tokens: Tensor,
    positions: Tensor | None,
    documents: Tensor | None,
    embeds: bool,
) -> int:
    """The sequence's length, as everyone agrees on it."""
    problems = []
    if embeds and (tokens.ndim != 2 or tokens.dtype not in {torch.int64, torch.int32}):
        problems.append(f"tokens {_describe(tokens)} must be int64 [batch, sequence]")
    if not embeds and (tokens.ndim != 3 or not tokens.dtype.is_floating_point):
        problems.append(
            f"input {_describe(tokens)} must be a hidden state [batch, sequence, dim={args.dim}],"
            " as tok_embeddings is absent"
        )
    if problems:
        raise ValueError("Transformer: " + "; ".join(problems))

    batch, seq_len = tokens.shape[:2]
    if not embeds:
        # A sequence-parallel hidden state is a part of the sequence; ids are for the whole of it.
        ids = positions if positions is not None else documents
        seq_len = seq_len if ids is None else ids.shape[-1]
    for name, ids, shapes in (
        ("positions", positions, ((seq_len,), (batch, seq_len))),
        ("documents", documents, ((batch, seq_len),)),
    ):
        if ids is None:
            continue
        if tuple(ids.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            problems.append(f"{name} {_describe(ids)} must have shape {wanted}")
        if ids.dtype.is_floating_point or ids.dtype.is_complex:
            problems.append(f"{name} {_describe(ids)} must be integers")
    if positions is None and seq_len > args.max_seq_len:
        problems.append(
            f"{seq_len} positions exceed max_seq_len={args.max_seq_len}; shorten the sequence, or"
            " build with dataclasses.replace(args, max_seq_len=...)"
        )
    if problems:
        raise ValueError("Transformer: " + "; ".join(problems))
    return seq_len


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
