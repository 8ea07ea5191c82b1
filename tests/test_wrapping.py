"""ptx issues the collectives that hand-written torch does: the same number, the same bytes."""

import pytest
import torch

import ptx
from collectives import CollectiveLog
from harness import distributed
from wrapping import build, step, wrap_by_hand, wrap_by_ptx

ARGS = ptx.ModelArgs(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=61, max_seq_len=16)


@pytest.mark.parametrize(
    "degrees",
    [{"dp_shard": 4}, {"tp": 4}, {"tp": 2}, {"dp_replicate": 2}, {"dp_replicate": 2, "tp": 2}],
    ids=str,
)
@distributed(world_size=4)
def test_same_collectives_as_by_hand(degrees):
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    tokens = torch.randint(61, (2, 16))
    seen = []
    for wrap in (wrap_by_ptx, wrap_by_hand):
        model = wrap(build(ARGS), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, tokens, tokens)  # the first step sets up
        with CollectiveLog() as log:
            step(model, optimizer, tokens, tokens)
        seen.append(log.calls)
    assert seen[0] == seen[1]
    assert seen[0].total() > 0
