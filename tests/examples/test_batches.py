"""The samples of a run: which they are, on which rank, and after a resume."""

from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist

import batches as data
from harness import distributed
from ptx.mesh import build_mesh, data_mesh


def stream(n_windows=10, seq_len=4, **options):
    """Training batches over tokens 0, 1, 2, ...: the first token of a sample says its window."""
    tokens = np.arange(n_windows * seq_len + 1, dtype=np.uint16)
    return data.TrainBatches(tokens, seq_len, **options)


def ids(batches, steps):
    """Window ids that a rank reads in its next steps."""
    return [
        [int(row[0]) // batches.seq_len for row in tokens] for tokens, _ in islice(batches, steps)
    ]


def flat(lists):
    return [item for items in lists for item in items]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- the training stream ---


def test_samples_are_windows_with_shifted_labels():
    tokens, labels = stream(global_batch=4).batch(0)
    assert tokens.shape == labels.shape == (4, 4)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens + 1, labels)  # the corpus counts up, so the next token is one more
    assert (tokens[:, 0] % 4 == 0).all()


def test_an_epoch_has_each_window_once_and_leaves_out_only_a_short_tail():
    tokens = np.arange(5 * 4 + 1 + 3, dtype=np.uint16)  # 5 windows, 3 tokens over
    batches = data.TrainBatches(tokens, 4, global_batch=1)
    assert sorted(flat(ids(batches, 5))) == [0, 1, 2, 3, 4]


def test_batch_depends_only_on_seed_and_samples_consumed():
    a, b = stream(global_batch=4, seed=7), stream(global_batch=4, seed=7)
    forward = [a.batch(n) for n in range(0, 40, 4)]
    backward = [b.batch(n) for n in range(36, -1, -4)][::-1]
    assert all(same(x, y) for x, y in zip(forward, backward, strict=True))
    assert not same(forward[0], stream(global_batch=4, seed=8).batch(0))


def test_D01_D07_resume_at_any_step_equals_uninterrupted():
    whole = ids(stream(global_batch=4), 12)
    for stop in range(12):
        first = stream(global_batch=4)
        seen = ids(first, stop)
        second = stream(global_batch=4)
        second.load_state_dict(first.state_dict())
        assert seen + ids(second, 12 - stop) == whole
    # 5 samples, saved after 7 reads: the next one is the third of the second epoch.
    first = stream(n_windows=5, global_batch=1)
    ids(first, 7)
    second = stream(n_windows=5, global_batch=1)
    second.load_state_dict(first.state_dict())
    assert ids(second, 1) == ids(stream(n_windows=5, global_batch=1, consumed=5 + 2), 1)


def test_D07_state_saved_in_the_loop_counts_the_batch_in_hand():
    batches = stream(global_batch=4)
    for step, _ in zip(range(1, 4), batches):
        assert batches.state_dict()["consumed"] == 4 * step


def test_resume_with_other_ranks_and_another_global_batch_goes_on_at_the_next_sample():
    samples = flat(ids(stream(global_batch=1), 24))
    first = stream(global_batch=4)
    ids(first, 3)
    resumed = [stream(global_batch=6, dp_rank=r, dp_world=2) for r in range(2)]
    for batches in resumed:
        batches.load_state_dict(first.state_dict())
    steps = zip(*(ids(batches, 2) for batches in resumed), strict=True)
    assert flat(a + b for a, b in steps) == samples[12:]


def test_resume_of_another_stream_is_refused():
    state = stream(global_batch=4).state_dict()
    for other in (stream(global_batch=4, seed=1), stream(n_windows=11, global_batch=4)):
        with pytest.raises(ValueError, match="not the same samples"):
            other.load_state_dict(state)


@pytest.mark.parametrize("dp_world", [2, 4])
def test_ranks_together_read_the_batches_of_one_process(dp_world):
    one = stream(global_batch=4)
    ranks = [stream(global_batch=4, dp_rank=r, dp_world=dp_world) for r in range(dp_world)]
    for want, *parts in islice(zip(one, *ranks), 6):
        assert same(want, [torch.cat(x) for x in zip(*parts, strict=True)])


def test_D03_epochs_differ_and_resume_inside_the_third_is_identical():
    epochs = [flat(ids(stream(global_batch=5, consumed=10 * e), 2)) for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    resumed = stream(global_batch=5)
    resumed.load_state_dict(stream(global_batch=5, consumed=25).state_dict())
    assert flat(ids(resumed, 1)) == epochs[2][5:]


def test_D09_a_batch_at_the_end_of_an_epoch_is_filled_from_the_next():
    batches = ids(stream(global_batch=4), 5)  # 10 windows: 4, 4, 2 + 2, 4, 4
    assert [len(batch) for batch in batches] == [4] * 5
    read = flat(batches)
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))


@distributed(world_size=4)
def test_D04_ranks_of_a_tp_group_read_the_same_samples():
    for degrees, want in [
        ({"tp": 2}, [0, 0, 1, 1]),
        ({"cp": 2}, [0, 0, 1, 1]),
        ({"pp": 2}, [0, 1, 0, 1]),
        ({"dp_replicate": 2, "dp_shard": 2}, [0, 1, 2, 3]),
        ({"dp_replicate": 2, "tp": 2}, [0, 0, 1, 1]),
    ]:
        dp = data_mesh(build_mesh(device_type="cpu", **degrees))
        mine = stream(global_batch=4, dp_rank=dp.get_local_rank(), dp_world=dp.size())
        read = [None] * 4
        dist.all_gather_object(read, (dp.get_local_rank(), dp.size(), ids(mine, 3)))
        assert [rank for rank, _, _ in read] == want
        assert {size for _, size, _ in read} == {len(set(want))}
        shares = dict.fromkeys(want)
        for rank, _, samples in read:
            assert shares[rank] in (None, samples)
            shares[rank] = samples
        steps = [flat(parts) for parts in zip(*(shares[r] for r in sorted(shares)), strict=True)]
        assert steps == ids(stream(global_batch=4), 3)


def test_batches_that_cannot_be_made_are_refused_with_every_reason():
    with pytest.raises(ValueError, match="global_batch 6 is no multiple of 4 data ranks"):
        stream(global_batch=6, dp_world=4)
    with pytest.raises(ValueError, match="10 windows of seq_len can't fill global_batch 12"):
        stream(global_batch=12)
    with pytest.raises(
        ValueError, match=r"no multiple of 4 .* and 10 windows of seq_len can't fill"
    ):
        stream(global_batch=13, dp_world=4)
    with pytest.raises(ValueError, match="0 windows"):
        data.TrainBatches(np.zeros(4, np.uint16), 4, global_batch=1)
    with pytest.raises(ValueError, match="global_batch 3 is no multiple of 2 data ranks"):
        next(data.validation_batches(np.zeros(9, np.uint16), 4, 3, 0, 2))


# --- validation ---


def test_D05_five_windows_on_two_ranks_pad_with_ignored_labels():
    tokens = np.arange(5 * 4 + 1, dtype=np.uint16)
    ranks = [list(data.validation_batches(tokens, 4, 2, rank, 2)) for rank in range(2)]
    windows = [[int(t[0, 0]) // 4 for t, y in batches if (y >= 0).all()] for batches in ranks]
    assert windows == [[0, 2, 4], [1, 3]]
    assert len(ranks[1]) == 3
    assert (ranks[1][2][1] == data.IGNORE_INDEX).all()


@pytest.mark.parametrize("n_tokens", [2, 5, 16, 17, 18, 41])
@pytest.mark.parametrize("dp_world", [1, 2, 4])
def test_D05_every_label_counts_once_in_equally_many_equal_batches(n_tokens, dp_world):
    tokens = np.arange(n_tokens, dtype=np.uint16)
    ranks = [
        list(data.validation_batches(tokens, 4, 4, rank, dp_world)) for rank in range(dp_world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    kept = []
    for inputs, labels in flat(ranks):
        assert inputs.shape == labels.shape == (4 // dp_world, 4)
        keep = labels != data.IGNORE_INDEX
        assert torch.equal(inputs[keep] + 1, labels[keep])
        kept += labels[keep].tolist()
    assert sorted(kept) == list(range(1, n_tokens))


def test_orders_are_drawn_once_an_epoch_and_two_at_most_are_kept():
    batches = stream(global_batch=4)
    for steps in range(1, 20):
        ids(batches, 1)
        assert len(batches._orders) <= 2, steps
    kept = batches._orders
    first = next(iter(kept.values()))
    batches.batch(batches.consumed)
    assert any(order is first for order in batches._orders.values())


def test_resume_on_other_contents_of_the_same_length_is_refused():
    state = stream(global_batch=4, digest="a text").state_dict()
    stream(global_batch=4, digest="a text").load_state_dict(state)
    with pytest.raises(ValueError, match="digest: not the same samples"):
        stream(global_batch=4, digest="another").load_state_dict(state)


def test_padding_is_not_counted():
    tokens = np.arange(18, dtype=np.uint16)  # 17 labels in windows of 4: three of a batch are empty
    batches = list(data.validation_batches(tokens, 4, 8, 0, 1))
    assert [tuple(labels.shape) for _, labels in batches] == [(8, 4)]
    assert int(data.count_tokens(batches[0][1])) == 17


def test_ids_beyond_16_bits_come_out_as_they_are():
    tokens = np.arange(70_000, 70_009, dtype=np.uint32)
    inputs, labels = data.TrainBatches(tokens, 8, global_batch=1).batch(0)
    assert inputs.tolist() == [list(range(70_000, 70_008))]
    assert labels.tolist() == [list(range(70_001, 70_009))]
