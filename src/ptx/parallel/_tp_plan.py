"""Tensor-parallel plans as data: which style each module of a known model gets."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from ptx._names import clean_named_modules, match_names
from ptx.model import Transformer
from ptx.parallel._tp_styles import (
    AttentionInput,
    HeadParallel,
    ModelInput,
    RefuseArguments,
    Replicated,
)

Plan = dict[str, ParallelStyle]

_USE_LOGITS = "its loss takes no sharded logits; compute it from .logits, e.g. by ptx.cross_entropy"
_SOME_HEADS = "they would be those of one rank's heads"
_ONE_PART = (
    "they would be parts of the sequence; take last_hidden_state, or plan with"
    " tp_plan(model, sequence_parallel=False)"
)


def tp_plan(model: nn.Module, *, sequence_parallel: bool = True) -> Plan:
    """The plan `apply_tp` uses for a model it knows: a dict to print, edit and pass to it.

    Keys are module names or globs: ``*`` stays within one dotted component, ``""`` is the model.
    Values are torch's ParallelStyles and the few that ``ptx.parallel`` adds. Modules the model
    lacks (a pipeline part, no q_norm) have no key. The plan fits every tp size.

    Args:
        model: `ptx.Transformer`, or transformers' ``LlamaForCausalLM`` or ``LlamaModel``; on any
            device, meta included. It isn't changed.
        sequence_parallel: Split the residual stream and its norms over the sequence (dim 1) too:
            1/tp of their activation memory and compute, for the same volume of communication. tp
            must then divide every sequence.

    Returns:
        Glob -> ParallelStyle.

    Raises:
        ValueError: No plan is known for the model.

    Source: Shoeybi et al., arXiv:1909.08053 (columns, then rows); Korthikanti et al.,
    arXiv:2205.05198 (the sequence).
    """
    if isinstance(model, Transformer):
        plan = _transformer_plan(model, sequence_parallel)
    else:
        plan = _transformers_plan(model, sequence_parallel)
    names = [name for name, _ in clean_named_modules(model)]
    return {key: style for key, style in plan.items() if _matches(key, names)}


def _transformer_plan(model: Transformer, sequence_parallel: bool) -> Plan:
    args = model.args
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    # [B, S, heads, head_dim]: what is split, with or without sequence parallelism, are the heads.
    head_norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    kv = HeadParallel(args.kv_heads, replicate=True)
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "layers.*.attention_norm": norm,
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "layers.*.attention.wq": HeadParallel(args.n_heads),
        "layers.*.attention.wk": kv,
        "layers.*.attention.wv": kv,
        "layers.*.attention.q_norm": head_norm,
        "layers.*.attention.k_norm": head_norm,
        "layers.*.attention.wo": RowwiseParallel(output_layouts=stream),
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


def _transformers_plan(model: nn.Module, sequence_parallel: bool) -> Plan:
    # By name: importing transformers takes seconds, and whoever has such a model has paid already.
    for cls in type(model).__mro__:
        if cls.__module__.startswith("transformers.") and cls.__name__ in _TRANSFORMERS_PLANS:
            return _TRANSFORMERS_PLANS[cls.__name__](model, sequence_parallel)
    known = ", ".join(["ptx.Transformer", *_TRANSFORMERS_PLANS])
    raise ValueError(
        f"tp_plan: no plan for {type(model).__name__}, only for {known}; give apply_tp a plan= of"
        " your own, module glob -> ParallelStyle"
    )


def _llama_for_causal_lm_plan(model: nn.Module, sequence_parallel: bool) -> Plan:
    stream = Shard(1) if sequence_parallel else Replicate()
    assert isinstance(model.model, nn.Module)
    body = _llama_model_plan(model.model, sequence_parallel)
    return {
        "": RefuseArguments({"labels": _USE_LOGITS, "output_attentions": _SOME_HEADS}),
        **{f"model.{key}".removesuffix("."): style for key, style in body.items()},
        "lm_head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }


def _llama_model_plan(model: nn.Module, sequence_parallel: bool) -> Plan:
    heads: int = model.config.num_attention_heads  # type: ignore[union-attr, assignment]
    kv_heads: int = model.config.num_key_value_heads  # type: ignore[union-attr, assignment]
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    kv = HeadParallel(kv_heads, replicate=True)
    plan: Plan = {
        # The model counts positions on this output; as a DTensor it is as long as the sequence.
        "embed_tokens": RowwiseParallel(
            input_layouts=Replicate(),
            output_layouts=stream,
            use_local_output=not sequence_parallel,
        ),
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": AttentionInput(stream, heads=heads, kv_heads=kv_heads),
        "layers.*.self_attn.q_proj": HeadParallel(heads),
        "layers.*.self_attn.k_proj": kv,
        "layers.*.self_attn.v_proj": kv,
        "layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=stream),
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


_TRANSFORMERS_PLANS: dict[str, Callable[[nn.Module, bool], Plan]] = {
    "LlamaForCausalLM": _llama_for_causal_lm_plan,
    "LlamaModel": _llama_model_plan,
}


def _matches(key: str, names: list[str]) -> bool:
    try:
        return bool(match_names(key, names, where="tp_plan"))
    except ValueError:
        return False
