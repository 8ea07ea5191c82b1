"""The shape and the switches of a `Transformer`, as one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """RoPE frequencies divided by ``factor``: positions are interpolated.

    Source: Chen et al., arXiv:2306.15595.
    """

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1: slow frequencies divided by ``factor``, fast ones kept.

    Between the two they are blended. Fast is a wavelength below ``original_max_position /
    high_freq_factor`` positions, slow one above ``original_max_position / low_freq_factor``.

    Source: the Llama 3.1 release (its ``rope_type`` is "llama3").
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Everything that decides a `Transformer`'s parameters and arithmetic.

    Widths left at None follow from the others, so ``dataclasses.replace(args, dim=...)`` stays
    consistent; read the resulting numbers from `kv_heads`, `head_width` and `ffn_width`.

    Args:
        dim: Width of the residual stream.
        n_layers: Number of blocks, of the whole model even where a pipeline part holds a few.
        n_heads: Query heads.
        vocab_size: Rows of the embedding and of the output.
        n_kv_heads: Key/value heads, a divisor of ``n_heads``; None: ``n_heads``.
        head_dim: Width of one head; ``n_heads * head_dim`` may differ from dim; None: dim/n_heads.
        multiple_of: The derived FFN width is rounded up to a multiple of this.
        ffn_dim_multiplier: Factor on the derived FFN width, before the rounding.
        hidden_dim: Exact FFN width; None: 2/3 of ``4 * dim``, times the multiplier, rounded up.
        rope_theta: Base of the RoPE frequencies.
        rope_scaling: `LinearScaling`, `Llama3Scaling` or None.
        norm_eps: Added to the mean square in every RMSNorm.
        tie_embeddings: The output uses the embedding's weight.
        qkv_bias: Biases on wq, wk, wv (Qwen2).
        o_bias: Bias on wo.
        mlp_bias: Biases on w1, w2, w3.
        qk_norm: RMSNorm over each head of q and k, before RoPE (Qwen3).
        sliding_window: A query sees keys at distance < window, its own position being at 0.
        window_layers: Which layers are windowed, ``n_layers`` flags; None: all, if a window is set.
        nope_layers: Which layers apply no RoPE, ``n_layers`` flags (SmolLM3); None: none of them.
        max_seq_len: Longest sequence the model takes; costs no memory.

    Raises:
        ValueError: Values that are impossible or contradict each other; lists all of them.
    """

    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    hidden_dim: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    nope_layers: tuple[bool, ...] | None = None
    max_seq_len: int = 32_768

    def __post_init__(self) -> None:
        problems = [*_bad_numbers(self), *_bad_layer_flags(self)]
        if not problems:  # the relations below divide by numbers checked above
            problems = _bad_relations(self)
        if problems:
            raise ValueError("ModelArgs: " + "; ".join(problems))

    @classmethod
    def from_hf(cls, config: object) -> ModelArgs:
        """The arguments of a transformers model whose checkpoints `Transformer` can hold.

        Llama 2 and 3.x, Mistral, Qwen2 and 2.5, Qwen3, SmolLM 1 to 3, and others that have one of
        their model types. RoPE may be spelled as transformers 5 does (``rope_parameters``) or as
        before (``rope_theta`` and ``rope_scaling``). Fields that are absent have transformers'
        values.

        Args:
            config: transformers' configuration object, a dict of it, or the path of a
                ``config.json`` or of a folder with one.

        Returns:
            Its arguments: logits equal transformers' to 5e-5 in float32.

        Raises:
            ValueError: Another model type; a field that isn't understood, or with a value that
                means something `Transformer` doesn't compute. Names each with its value.

        Cost: a read of one small file, if a path was given; transformers isn't imported.
        """
        from ptx.model._from_hf import args_from_hf

        return args_from_hf(config)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the whole model."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        """Width of one head of q, k and v."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layers' inner activation."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        width = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return self.multiple_of * -(-width // self.multiple_of)

    def heads_split(self, tp: int) -> bool:
        """Whether ``tp`` ranks can share the heads; else `tp_plan` has to keep attention whole."""
        return self.n_heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)

    def uses_rope(self, layer: int) -> bool:
        """Whether this layer rotates its queries and keys."""
        return self.nope_layers is None or not self.nope_layers[layer]

    def window(self, layer: int) -> int | None:
        """This layer's sliding window, None for full causal attention."""
        if self.window_layers is None or self.window_layers[layer]:
            return self.sliding_window
        return None


def _bad_numbers(args: ModelArgs) -> list[str]:
    counts: dict[str, object] = {
        name: getattr(args, name)
        for name in ("dim", "n_layers", "n_heads", "vocab_size", "multiple_of", "max_seq_len")
    }
    for name in ("n_kv_heads", "head_dim", "hidden_dim", "sliding_window"):
        if getattr(args, name) is not None:
            counts[name] = getattr(args, name)
    sizes: dict[str, float] = {"rope_theta": args.rope_theta, "norm_eps": args.norm_eps}
    if args.ffn_dim_multiplier is not None:
        sizes["ffn_dim_multiplier"] = args.ffn_dim_multiplier
    scaling = args.rope_scaling
    if scaling is not None:
        sizes["rope_scaling.factor"] = scaling.factor
    if isinstance(scaling, Llama3Scaling):
        sizes["rope_scaling.low_freq_factor"] = scaling.low_freq_factor
        sizes["rope_scaling.high_freq_factor"] = scaling.high_freq_factor
        counts["rope_scaling.original_max_position"] = scaling.original_max_position
    problems = [
        f"{name}={value!r} must be an int of at least 1"
        for name, value in counts.items()
        if not isinstance(value, int) or value < 1
    ]
    problems += [f"{name}={value!r} must be above 0" for name, value in sizes.items() if value <= 0]
    return problems


def _bad_layer_flags(args: ModelArgs) -> list[str]:
    problems = []
    for name in ("window_layers", "nope_layers"):
        flags = getattr(args, name)
        if flags is None:
            continue
        if not isinstance(flags, tuple):  # a list would make the args unhashable
            problems.append(f"{name} is a {type(flags).__name__}, pass a tuple of bools")
        elif len(flags) != args.n_layers:
            problems.append(
                f"{name} has {len(flags)} flags for n_layers={args.n_layers}, pass one a layer"
            )
    if args.window_layers is not None and args.sliding_window is None:
        problems.append(
            "window_layers is given but sliding_window is None, set the window's size too"
        )
    return problems


def _bad_relations(args: ModelArgs) -> list[str]:
    problems = []
    if args.head_dim is None and args.dim % args.n_heads:
        problems.append(
            f"n_heads={args.n_heads} doesn't divide dim={args.dim}, set head_dim or change either"
        )
    if args.n_heads % args.kv_heads:
        problems.append(
            f"n_kv_heads={args.kv_heads} doesn't divide n_heads={args.n_heads},"
            " every kv head serves the same number of query heads"
        )
    if args.head_width % 2:
        problems.append(f"head_dim={args.head_width} is odd, RoPE rotates its halves: make it even")
    if args.hidden_dim is not None and args.ffn_dim_multiplier is not None:
        problems.append(
            f"hidden_dim={args.hidden_dim} is exact, so"
            f" ffn_dim_multiplier={args.ffn_dim_multiplier} would do nothing: drop one of them"
        )
    scaling = args.rope_scaling
    if isinstance(scaling, Llama3Scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        problems.append(
            f"rope_scaling: low_freq_factor={scaling.low_freq_factor} must be below"
            f" high_freq_factor={scaling.high_freq_factor}"
        )
    return problems
