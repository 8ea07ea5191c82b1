"""Tensor-parallel plans as data: which style each module of a known model gets."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from ptx._names import clean_named_modules, match_names
from ptx.model import Transformer
from ptx.parallel._tp_inputs import AttentionInput, ModelInput, RefuseArguments
from ptx.parallel._tp_refuse import whole_matrix_reason
from ptx.parallel._tp_styles import HeadParallel, Replicated

Plan = dict[str, ParallelStyle]

# Families of transformers whose modules have the names, and whose forward the steps, of Llama's.
_LIKE_LLAMA = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")

_USE_LOGITS = "its loss takes no sharded logits; compute it from .logits, e.g. by ptx.cross_entropy"
_SOME_HEADS = "they would be those of one rank's heads"
_ONE_PART = (
    "they would be parts of the sequence; take last_hidden_state, or plan with"
    " tp_plan(model, sequence_parallel=False)"
)


def tp_plan(
    model: nn.Module, *, sequence_parallel: bool = True, whole_attention: bool = False
) -> Plan:
    """The plan `apply_tp` uses for a model it knows: a dict to print, edit and pass to it.

    Keys are module names or globs: ``*`` stays within one dotted component, ``""`` is the model.
    Values are torch's ParallelStyles and the few that ``ptx.parallel`` adds. Modules the model
    lacks (a pipeline part, no q_norm) have no key. The plan fits every tp size.

    Args:
        model: `ptx.Transformer`, or ``ForCausalLM`` or ``Model`` of transformers' Llama, Mistral,
            Qwen2, Qwen3 or SmolLM3; on any device, meta included. It isn't changed.
        sequence_parallel: Split the residual stream and its norms over the sequence (dim 1) too:
            1/tp of their activation memory and compute, for the same volume of communication. tp
            must then divide every sequence.
        whole_attention: Every rank computes all of the attention, for a number of heads that tp
            doesn't divide; embedding, feed-forward and head are split.

    Returns:
        Glob -> ParallelStyle.

    Raises:
        ValueError: No plan is known for the model; says what in it can't be split, if it shows.

    Source: Shoeybi et al., arXiv:1909.08053 (columns, then rows); Korthikanti et al.,
    arXiv:2205.05198 (the sequence).
    """
    if isinstance(model, Transformer):
        plan = _transformer_plan(model, sequence_parallel, whole_attention)
    else:
        plan = _transformers_plan(model, sequence_parallel, whole_attention)
    names = [name for name, _ in clean_named_modules(model)]
    return {key: style for key, style in plan.items() if _matches(key, names)}


def _transformer_plan(model: Transformer, sequence_parallel: bool, whole_attention: bool) -> Plan:
    args = model.args
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    names = {"q": "wq", "k": "wk", "v": "wv", "o": "wo"}
    heads = (args.n_heads, args.kv_heads)
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "layers.*.attention_norm": norm,
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        **{
            f"layers.*.attention.{names.get(part, part)}": style
            for part, style in _attention_styles(heads, stream, whole_attention).items()
        },
        "layers.*.ffn_norm": norm,
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=stream, desired_input_layouts=Replicate()
        ),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=stream),
        "norm": norm,
        "output": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }


def _attention_styles(heads: tuple[int, int], stream: Placement, whole: bool) -> Plan:
    """Styles of what is in an attention, in the order of its forward."""
    if whole:
        split = stream if stream.is_shard() else None
        plain = dict.fromkeys(("q", "k", "v", "q_norm", "k_norm"), Replicated())
        return {**plain, "o": Replicated(output=split)}
    kv = HeadParallel(heads[1], replicate=True)
    # On [B, S, heads, head_dim], whose heads are this rank's, sequence parallel or not: the
    # gradient of such a norm is a sum over the ranks.
    head_norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {
        "q": HeadParallel(heads[0]),
        "k": kv,
        "v": kv,
        "q_norm": head_norm,
        "k_norm": head_norm,
        "o": RowwiseParallel(output_layouts=stream),
    }


def _transformers_plan(model: nn.Module, sequence_parallel: bool, whole_attention: bool) -> Plan:
    # By name: importing transformers takes seconds, and whoever has such a model has paid already.
    for cls in type(model).__mro__:
        family = cls.__name__.removesuffix("ForCausalLM").removesuffix("Model")
        if cls.__module__.startswith("transformers.") and family in _LIKE_LLAMA:
            if cls.__name__ == f"{family}ForCausalLM":
                return _causal_lm_plan(model, sequence_parallel, whole_attention)
            if cls.__name__ == f"{family}Model":
                return _body_plan(model, sequence_parallel, whole_attention)
    reason = whole_matrix_reason(model)
    families = ", ".join(_LIKE_LLAMA)
    raise ValueError(
        f"tp_plan: no plan for {type(model).__name__}{f' ({reason})' if reason else ''}, only for"
        f" ptx.Transformer and transformers' {families} (ForCausalLM and Model); give apply_tp a"
        " plan= of your own, module glob -> ParallelStyle"
    )


def _causal_lm_plan(model: nn.Module, sequence_parallel: bool, whole_attention: bool) -> Plan:
    stream = Shard(1) if sequence_parallel else Replicate()
    assert isinstance(model.model, nn.Module)
    body = _body_plan(model.model, sequence_parallel, whole_attention)
    return {
        "": RefuseArguments({"labels": _USE_LOGITS, "output_attentions": _SOME_HEADS}),
        **{f"model.{key}".removesuffix("."): style for key, style in body.items()},
        "lm_head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }


def _body_plan(model: nn.Module, sequence_parallel: bool, whole_attention: bool) -> Plan:
    heads: int = model.config.num_attention_heads  # type: ignore[union-attr, assignment]
    kv_heads: int = model.config.num_key_value_heads  # type: ignore[union-attr, assignment]
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    names = {part: f"{part}_proj" for part in "qkvo"}
    plan: Plan = {
        # The model counts positions on this output; as a DTensor it is as long as the sequence.
        "embed_tokens": RowwiseParallel(
            input_layouts=Replicate(),
            output_layouts=stream,
            use_local_output=not sequence_parallel,
        ),
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": AttentionInput(
            stream, heads=heads, kv_heads=kv_heads, whole=whole_attention
        ),
        **{
            f"layers.*.self_attn.{names.get(part, part)}": style
            for part, style in _attention_styles((heads, kv_heads), stream, whole_attention).items()
        },
        "layers.*.post_attention_layernorm": norm,
        "layers.*.mlp": PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate()),
        "layers.*.mlp.gate_proj": ColwiseParallel(),
        "layers.*.mlp.up_proj": ColwiseParallel(),
        "layers.*.mlp.down_proj": RowwiseParallel(output_layouts=stream),
        "norm": norm,
    }
    if sequence_parallel:
        plan[""] = ModelInput({"output_hidden_states": _ONE_PART})
        # From here on the residual stream is a plain tensor, this rank's part.
        plan["layers.0"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True
        )
    return plan


def _matches(key: str, names: list[str]) -> bool:
    try:
        return bool(match_names(key, names, where="tp_plan"))
    except ValueError:
        return False
