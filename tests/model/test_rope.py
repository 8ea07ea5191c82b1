from dataclasses import replace

import pytest
import torch

from ptx.model import LinearScaling, Llama3Scaling, ModelArgs, Transformer
from ptx.model._rope import Rope, apply_rope, inverse_frequencies, rope_tables

ARGS = ModelArgs(dim=128, n_layers=1, n_heads=1, vocab_size=8, rope_theta=5e5)
CPU = torch.device("cpu")


def interleaved(x, rope):
    """The original Llama's pairing: channel 2i with 2i + 1."""
    cos, sin = rope.cos.unsqueeze(-2), rope.sin.unsqueeze(-2)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def test_M01_halves_are_rotated_not_neighbours():
    torch.manual_seed(0)
    args = replace(ARGS, dim=8, rope_theta=1e4)
    rope = rope_tables(args, torch.arange(32))
    q = torch.randn(1, 32, 2, 8)
    evens_then_odds = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    half = apply_rope(q[..., evens_then_odds], rope)
    assert torch.equal(half, interleaved(q, rope)[..., evens_then_odds])
    assert (apply_rope(q, rope) - interleaved(q, rope)).abs().max() > 2


def test_rotation_by_hand():
    rope = Rope(torch.tensor([[0.5]]), torch.tensor([[2.0]]))
    x = torch.tensor([3.0, 7.0]).view(1, 1, 1, 2)
    assert apply_rope(x, rope).flatten().tolist() == [3 * 0.5 - 7 * 2.0, 7 * 0.5 + 3 * 2.0]


def test_positions_per_row():
    torch.manual_seed(0)
    q = torch.randn(2, 3, 1, 128)
    positions = torch.tensor([[0, 1, 2], [5, 0, 9]])
    both = apply_rope(q, rope_tables(ARGS, positions))
    for row in range(2):
        alone = apply_rope(q[row : row + 1], rope_tables(ARGS, positions[row]))
        torch.testing.assert_close(both[row : row + 1], alone, atol=0, rtol=0)


def test_scores_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 128), torch.randn(1, 1, 1, 128)

    def score(at_q, at_k):
        rotated = [
            apply_rope(x, rope_tables(ARGS, torch.tensor([p]))) for x, p in ((q, at_q), (k, at_k))
        ]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(3, 1), score(1003, 1001), atol=1e-3, rtol=1e-3)
    assert (score(3, 1) - score(4, 1)).abs() > 1e-2


def llama3(factor):
    return Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )


def test_M02_llama3_bands():
    args = replace(ARGS, dim=64, rope_scaling=llama3(32.0))
    scaled, plain = (inverse_frequencies(a, CPU) for a in (args, replace(args, rope_scaling=None)))
    torch.testing.assert_close(
        scaled[[10, 15, 16, 17, 20, 31]],
        torch.tensor(
            [
                1.65604401e-2,
                1.29054793e-3,
                4.29556797e-4,
                9.7082878e-5,
                8.57025549e-6,
                9.41830673e-8,
            ]
        ),
        atol=0,
        rtol=1e-6,
    )
    assert torch.equal(scaled[:15], plain[:15])
    assert torch.equal(scaled[18:], plain[18:] / 32)
    mixed = scaled[15:18] / plain[15:18]
    assert ((mixed > 1 / 32 + 1e-3) & (mixed < 1 - 1e-3)).all()


def test_M02_llama3_band_widths_at_head_dim_128():
    scaled, plain = (
        inverse_frequencies(replace(ARGS, rope_scaling=s), CPU) for s in (llama3(8.0), None)
    )
    kept, divided = (scaled == plain).sum().item(), (scaled == plain / 8).sum().item()
    assert (kept, 64 - kept - divided, divided) == (29, 6, 29)


def test_linear_scaling_interpolates_positions():
    scaled = rope_tables(
        replace(ARGS, rope_scaling=LinearScaling(factor=4.0)), torch.arange(0, 64, 4)
    )
    plain = rope_tables(ARGS, torch.arange(16))
    torch.testing.assert_close(scaled.cos, plain.cos, atol=1e-6, rtol=0)
    torch.testing.assert_close(scaled.sin, plain.sin, atol=1e-6, rtol=0)


def test_M05_angles_are_exact_to_1e_3_at_position_8192():
    positions = torch.tensor([128, 1024, 8192])
    exact = positions.double()[:, None] * 5e5 ** (
        -torch.arange(0, 128, 2, dtype=torch.float64) / 128
    )
    rope = rope_tables(ARGS, positions)
    for got, want in ((rope.cos, exact.cos()), (rope.sin, exact.sin())):
        assert (got - want).abs().max() < 1e-3


@pytest.fixture
def bfloat16_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def tables_of(model: Transformer, positions: torch.Tensor) -> Rope:
    """What the model's first block really receives."""
    seen: list[Rope] = []
    handle = model.layers["0"].register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    with torch.no_grad():
        model(torch.zeros(1, len(positions), dtype=torch.int64), positions=positions)
    handle.remove()
    return seen[0]


SMALL = ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=8, multiple_of=8, rope_theta=5e5)
FAR = torch.tensor([0, 128, 1024, 8192])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_M05_tables_survive_a_cast_of_the_model(dtype):
    want = rope_tables(SMALL, FAR)
    model = Transformer(SMALL)
    for cast in (model.to(dtype), model.to(dtype).float()):  # nor is there anything to repair
        got = tables_of(cast, FAR)
        assert got.cos.dtype == torch.float32
        assert torch.equal(got.cos, want.cos)
        assert torch.equal(got.sin, want.sin)


@pytest.mark.usefixtures("bfloat16_default")
def test_M05_tables_survive_a_bfloat16_default_dtype():
    got = tables_of(Transformer(SMALL), FAR)
    exact = FAR.double()[:, None] * 5e5 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert got.cos.dtype == torch.float32
    assert (got.cos - exact.cos()).abs().max() < 1e-3


def test_rotation_of_bfloat16_rounds_once():
    torch.manual_seed(0)
    q = torch.randn(1, 4, 2, 8).bfloat16()
    rope = rope_tables(SMALL, FAR)
    out = apply_rope(q, rope)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rope(q.float(), rope).bfloat16())


def test_runs_on_meta():
    args = replace(ARGS, rope_scaling=llama3(8.0))
    rope = rope_tables(args, torch.empty(2, 5, dtype=torch.int64, device="meta"))
    assert rope.cos.shape == (2, 5, 64)
