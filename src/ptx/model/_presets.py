"""Named model sizes."""

from __future__ import annotations

from dataclasses import replace

from ptx.model._args import Llama3Scaling, ModelArgs

_AGPT_VOCAB = 256_128  # a Gemma tokenizer's 256,000 entries, padded to a multiple of 128
_LLAMA3_VOCAB = 128_256

_LLAMA3_8B = ModelArgs(
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    vocab_size=_LLAMA3_VOCAB,
    multiple_of=1024,
    ffn_dim_multiplier=1.3,
    rope_theta=500_000.0,
    max_seq_len=8192,
)


def preset(name: str) -> ModelArgs:
    """The arguments of a named model; ``dataclasses.replace`` changes any of them.

    Args:
        name: A name or a long form of it ("xl", "xlarge", "extra-large"); case doesn't matter, nor
            whether parts are joined by "-" or "_".

    Raises:
        ValueError: Unknown name; lists the choices.

    Source: the debug to xxxl and AuroraGPT (agpt) sizes are those of the `ezpz` 2-D parallel
    example; Llama 3: arXiv:2407.21783, table 3, and the released configurations.
    """
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in _PRESETS:
        long_forms = ", ".join(f"{alias} = {short}" for alias, short in _ALIASES.items())
        raise ValueError(
            f"preset: {name!r} is unknown; choose one of {', '.join(_PRESETS)}"
            f" (long forms: {long_forms})"
        )
    return _PRESETS[key]


def _sized(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, multiple_of: int) -> ModelArgs:
    return ModelArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        multiple_of=multiple_of,
        vocab_size=32_000,
    )


_PRESETS = {
    "debug": _sized(128, 4, 4, 2, 128),
    "s": _sized(768, 12, 12, 4, 256),
    "m": _sized(1024, 16, 16, 4, 256),
    "l": _sized(1536, 16, 16, 4, 256),
    "xl": _sized(2048, 24, 32, 8, 256),
    "xxl": _sized(4096, 32, 32, 8, 256),
    "xxxl": _sized(5120, 40, 40, 8, 256),
    "agpt-2b": ModelArgs(
        dim=2048,
        n_layers=12,
        n_heads=16,
        n_kv_heads=4,
        hidden_dim=11_008,
        vocab_size=_AGPT_VOCAB,
        rope_theta=50_000.0,
    ),
    "agpt-20b": ModelArgs(
        dim=5120,
        n_layers=64,
        n_heads=40,
        n_kv_heads=8,
        hidden_dim=14_336,
        multiple_of=1024,
        vocab_size=_AGPT_VOCAB,
        rope_theta=500_000.0,
    ),
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": replace(_LLAMA3_8B, dim=8192, n_layers=80, n_heads=64, multiple_of=4096),
    # Released with 3.1 only, hence the long context and its scaling.
    "llama3-405b": replace(
        _LLAMA3_8B,
        dim=16_384,
        n_layers=126,
        n_heads=128,
        multiple_of=4096,
        ffn_dim_multiplier=1.2,
        max_seq_len=131_072,
        rope_scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
        ),
    ),
}

_ALIASES = {
    "small": "s",
    "medium": "m",
    "large": "l",
    "xlarge": "xl",
    "x-large": "xl",
    "extra-large": "xl",
    "xxlarge": "xxl",
    "xx-large": "xxl",
    "2xl": "xxl",
    "xxxlarge": "xxxl",
    "xxx-large": "xxxl",
    "3xl": "xxxl",
    "agpt2b": "agpt-2b",
    "agpt20b": "agpt-20b",
    "llama-3-8b": "llama3-8b",
    "llama-3-70b": "llama3-70b",
    "llama-3-405b": "llama3-405b",
}
