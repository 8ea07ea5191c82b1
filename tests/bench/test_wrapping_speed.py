import statistics

import pytest
import torch
from interleaved import paired_ratio

import harness
import ptx
from wrapping import build, step, wrap_by_hand, wrap_by_ptx

ARGS = ptx.ModelArgs(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, vocab_size=4096, max_seq_len=128)


@pytest.mark.bench
@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [({}, 1), ({"dp_shard": 2}, 2), ({"tp": 2}, 2), ({"tp": 2, "dp_shard": 2}, 4)],
    ids=str,
)
def test_step_costs_what_hand_written_torch_costs(degrees, ranks):
    ratios = harness.run(_ratio, ranks, degrees, timeout=600)
    ratio = statistics.median(ratios)
    print(
        f"\n{degrees}: step by ptx / by hand {ratio:.3f} (CPU clock, median of 31 pairs and ranks)"
    )
    assert ratio <= 1.03


def _ratio(degrees):
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    tokens = torch.randint(4096, (2, 128))
    calls = []
    for wrap in (wrap_by_ptx, wrap_by_hand):
        model = wrap(build(ARGS), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        calls.append(lambda m=model, o=optimizer: step(m, o, tokens, tokens))
    return paired_ratio(*calls, rounds=31)
