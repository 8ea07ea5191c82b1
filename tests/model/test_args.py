from dataclasses import replace

import pytest

from ptx.model import LinearScaling, Llama3Scaling, ModelArgs

TINY = ModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=100)


def test_widths_follow_from_dim():
    assert (TINY.kv_heads, TINY.head_width, TINY.ffn_width) == (4, 16, 256)
    wide = replace(TINY, dim=4096, n_heads=32, multiple_of=1024, ffn_dim_multiplier=1.3)
    assert (wide.kv_heads, wide.head_width, wide.ffn_width) == (32, 128, 14336)


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "want"),
    [
        (64, 1, None, 170),  # 2/3 of 256, cut to an int
        (64, 17, None, 170),  # already a multiple: not one more
        (64, 16, None, 176),
        (64, 16, 1.5, 256),  # int(1.5 * 170) = 255, rounded up after the factor
    ],
)
def test_ffn_width_rule(dim, multiple_of, multiplier, want):
    args = replace(TINY, dim=dim, multiple_of=multiple_of, ffn_dim_multiplier=multiplier)
    assert args.ffn_width == want


def test_explicit_widths_are_exact():
    args = replace(TINY, hidden_dim=77, head_dim=10, n_kv_heads=2)
    assert (args.ffn_width, args.head_width, args.kv_heads) == (77, 10, 2)


def test_layer_switches():
    args = replace(TINY, sliding_window=8, window_layers=(True, False), nope_layers=(False, True))
    assert [args.window(i) for i in range(2)] == [8, None]
    assert [args.uses_rope(i) for i in range(2)] == [True, False]
    assert replace(args, window_layers=None).window(1) == 8
    assert TINY.window(0) is None
    assert TINY.uses_rope(0)


def test_args_are_hashable_and_comparable():
    args = replace(TINY, nope_layers=(True, False), rope_scaling=LinearScaling(factor=2.0))
    assert len({args, replace(args), TINY}) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 0}, ["dim=0", "at least 1"]),
        ({"n_layers": 2.0}, ["n_layers=2.0", "int"]),
        ({"head_dim": -1}, ["head_dim=-1"]),
        ({"norm_eps": 0.0}, ["norm_eps=0.0"]),
        ({"rope_theta": -1.0}, ["rope_theta=-1.0"]),
        ({"sliding_window": 0}, ["sliding_window=0"]),
        ({"dim": 66}, ["n_heads=4", "dim=66", "head_dim"]),
        ({"n_kv_heads": 3}, ["n_kv_heads=3", "n_heads=4"]),
        ({"head_dim": 15}, ["head_dim=15", "even"]),
        ({"hidden_dim": 70, "ffn_dim_multiplier": 1.5}, ["hidden_dim=70", "1.5", "drop"]),
        ({"window_layers": (True, True)}, ["window_layers", "sliding_window is None"]),
        ({"nope_layers": (True,)}, ["nope_layers has 1 flags", "n_layers=2"]),
        ({"nope_layers": [True, False]}, ["nope_layers is a list", "tuple"]),
        ({"rope_scaling": LinearScaling(factor=0.0)}, ["rope_scaling.factor=0.0"]),
        (
            {
                "rope_scaling": Llama3Scaling(
                    factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0, original_max_position=64
                )
            },
            ["low_freq_factor=4.0", "high_freq_factor=1.0"],
        ),
    ],
)
def test_error_names_values_and_fix(changes, words):
    with pytest.raises(ValueError, match="ModelArgs: ") as error:
        replace(TINY, **changes)
    for word in words:
        assert word in str(error.value)


def test_error_lists_every_violation():
    with pytest.raises(ValueError) as error:
        replace(TINY, n_kv_heads=3, head_dim=15, hidden_dim=8, ffn_dim_multiplier=2.0)
    assert str(error.value).count(";") == 2
    with pytest.raises(ValueError) as error:
        replace(TINY, dim=-1, vocab_size=0, nope_layers=(True,))
    for word in ("dim=-1", "vocab_size=0", "nope_layers"):
        assert word in str(error.value)


def test_which_tp_can_share_the_heads():
    args = replace(TINY, n_heads=12, dim=96, n_kv_heads=3)
    assert [tp for tp in range(1, 13) if args.heads_split(tp)] == [1, 3, 6, 12]
    assert [tp for tp in range(1, 13) if replace(TINY, n_kv_heads=2).heads_split(tp)] == [1, 2, 4]
