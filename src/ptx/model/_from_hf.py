"""Read `ModelArgs` from a transformers configuration, or refuse it by field and value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ptx.model._args import LinearScaling, Llama3Scaling, ModelArgs, RopeScaling
from ptx.model._hf_fields import Fields, read_config

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class _Family:
    """What one ``model_type`` fixes, and the values of fields that are absent.

    Source: the configuration and modelling files of transformers 5.24.
    """

    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    max_positions: int = 32_768
    tied: bool = False
    window: int | None = None
    layer_types: bool = False  # windows by layer, switched on by use_sliding_window
    attention_bias: bool = False  # on q, k, v and o, if the field says so
    mlp_bias: bool = False
    qkv_bias: bool = False  # always
    qk_norm: bool = False
    nope: bool = False


FAMILIES = {
    "llama": _Family(max_positions=2048, attention_bias=True, mlp_bias=True),
    "mistral": _Family(kv_heads=8, max_positions=131_072, window=4096),
    "qwen2": _Family(kv_heads=32, window=4096, layer_types=True, qkv_bias=True),
    "qwen3": _Family(
        kv_heads=32, head_dim=128, window=4096, layer_types=True, attention_bias=True, qk_norm=True
    ),
    "smollm3": _Family(
        kv_heads=4,
        rope_theta=2_000_000.0,
        tied=True,
        layer_types=True,
        attention_bias=True,
        mlp_bias=True,
        nope=True,
    ),
}


def args_from_hf(config: object) -> ModelArgs:
    """`ModelArgs.from_hf`, which documents it."""
    fields = Fields(read_config(config))
    model_type = fields.take("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"ModelArgs.from_hf: model_type={model_type!r} isn't one of {', '.join(FAMILIES)};"
            " train transformers' own model, which every ptx function takes as well"
        )
    family = FAMILIES[model_type]
    layers = fields.need("num_hidden_layers")
    heads = fields.need("num_attention_heads")
    theta, scaling = _rope(fields, family)
    bias = family.attention_bias and fields.take("attention_bias", False)
    nope = _nope_layers(fields, layers) if family.nope else None
    window, window_layers = _windows(fields, family, layers, nope)
    values: dict[str, Any] = {
        "dim": fields.need("hidden_size"),
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": fields.take("num_key_value_heads", family.kv_heads or heads, null=heads),
        "head_dim": fields.take("head_dim", family.head_dim, null=None),
        "hidden_dim": fields.need("intermediate_size"),
        "vocab_size": fields.need("vocab_size"),
        "max_seq_len": fields.take("max_position_embeddings", family.max_positions),
        "norm_eps": fields.take("rms_norm_eps", 1e-6),
        "tie_embeddings": fields.take("tie_word_embeddings", family.tied),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qkv_bias": bias or family.qkv_bias,
        "o_bias": bias,
        "mlp_bias": family.mlp_bias and fields.take("mlp_bias", False),
        "qk_norm": family.qk_norm,
        "sliding_window": window,
        "window_layers": window_layers,
        "nope_layers": nope,
    }
    _architecture(fields)
    problems = [*fields.problems, *fields.not_understood()]
    if problems:
        lines = "".join(f"\n- {problem}" for problem in dict.fromkeys(problems))
        raise ValueError(f"ModelArgs.from_hf: this {model_type} is more than ptx computes:{lines}")
    return ModelArgs(**values)


def _architecture(fields: Fields) -> None:
    names = fields.take("architectures") or []
    if names and not any(str(name).endswith(("ForCausalLM", "Model")) for name in names):
        fields.problems.append(f"architectures={names!r}, only a ForCausalLM has tokens as output")


def _rope(fields: Fields, family: _Family) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from the old spelling (rope_theta, rope_scaling) or the new one."""
    old, new = (fields.take(name) or {} for name in ("rope_scaling", "rope_parameters"))
    top_theta = fields.take("rope_theta")
    if not isinstance(old, dict) or not isinstance(new, dict) or FULL in new or SLIDING in new:
        fields.problems.append(
            f"rope_parameters={new or old!r}, only one set of numbers for all layers is known"
        )
        return family.rope_theta, None
    old, new = dict(old), dict(new)
    top_original = fields.take("original_max_position_embeddings")
    for spelling in (old, new):
        if spelling and top_original is not None:
            original = spelling.setdefault("original_max_position_embeddings", top_original)
            if original != top_original:
                fields.problems.append(
                    f"original_max_position_embeddings is {top_original!r} and {original!r}"
                )
    if old and new and _scaling(fields, old) != _scaling(fields, new):
        fields.problems.append(f"rope_scaling={old!r} and rope_parameters={new!r} disagree")
    thetas = [theta for theta in (top_theta, old.get("rope_theta"), new.get("rope_theta")) if theta]
    if len({*thetas}) > 1:
        fields.problems.append(f"rope_theta is given as {' and '.join(map(repr, thetas))}")
    return float(thetas[0] if thetas else family.rope_theta), _scaling(fields, old or new)


def _scaling(fields: Fields, given: dict[str, Any]) -> RopeScaling | None:
    left = {
        name: value for name, value in given.items() if value is not None and name != "rope_theta"
    }
    kind = left.pop("rope_type", left.get("type", "default"))
    older_kind = left.pop("type", kind)
    wanted = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }.get(kind)
    if left.get("partial_rotary_factor") == 1:
        del left["partial_rotary_factor"]
    if wanted is None or older_kind != kind:
        fields.problems.append(
            f"rope_type={kind!r} (type={older_kind!r}), only default, linear and llama3 are known"
        )
        return None
    original = left.pop("original_max_position_embeddings", None)
    if missing := [name for name in wanted if name not in left]:
        fields.problems.append(f"rope_type={kind!r} without {', '.join(missing)}")
        return None
    numbers = {name: float(left.pop(name)) for name in wanted}
    fields.problems += [f"rope_type={kind!r} with {n}={v!r}" for n, v in left.items()]
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(**numbers)
    if original is None:
        fields.problems.append(f"rope_type={kind!r} without original_max_position_embeddings")
        return None
    return Llama3Scaling(**numbers, original_max_position=int(original))


def _nope_layers(fields: Fields, layers: int) -> tuple[bool, ...] | None:
    interval = fields.take("no_rope_layer_interval", 4)
    rotated = fields.take("no_rope_layers")  # in spite of its name, 1 where RoPE is applied
    if rotated is None:
        rotated = [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(rotated) < layers:
        fields.problems.append(
            f"no_rope_layers has {len(rotated)} entries for num_hidden_layers={layers}"
        )
        return None
    flags = tuple(not rotated[layer] for layer in range(layers))
    return flags if any(flags) else None


def _windows(
    fields: Fields, family: _Family, layers: int, nope: tuple[bool, ...] | None
) -> tuple[int | None, tuple[bool, ...] | None]:
    if not family.layer_types:
        # Null is a choice here: Mistral 0.2 and later have no window.
        return fields.take("sliding_window", family.window, null=None), None
    switch = fields.take("use_sliding_window", False)
    window = fields.take("sliding_window", family.window, null=None)
    lowest = fields.take("max_window_layers", 28)
    types = fields.take("layer_types")
    if not switch:
        window = None
    if types is None and window is not None:
        windowed = [
            (nope is not None and nope[layer]) if family.nope else layer >= lowest
            for layer in range(layers)
        ]
        types = [SLIDING if flag else FULL for flag in windowed]
    if types is None:
        return None, None
    if len(types) < layers or not {*types} <= {FULL, SLIDING}:
        fields.problems.append(
            f"layer_types={types!r}, one of {FULL!r} and {SLIDING!r} is known for each layer"
        )
        return None, None
    flags = tuple(kind == SLIDING for kind in types[:layers])
    if not any(flags):
        return None, None
    if window is None:
        fields.problems.append(f"layer_types has {SLIDING!r}, but no sliding_window is switched on")
        return None, None
    return window, None if all(flags) else flags
