from itertools import product

import pytest
import torch

from ptx.model._mask import mask_info

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [7, 7, 2, 2, 2, 7]])  # ids in no order, one returning


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6, 100])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_dense_mask_by_its_definition(documents, window):
    positions = torch.tensor([0, 1, 2, 0, 1, 2])  # ids that restart decide nothing
    info = mask_info(positions, documents, window)
    if documents is None and window in {None, 6, 100}:
        assert info.is_causal
        assert info.dense is None
        return
    assert not info.is_causal
    for row, q, k in product(range(info.dense.shape[0]), range(6), range(6)):
        want = (
            k <= q
            and (window is None or q - k < window)
            and (documents is None or bool(documents[row, q] == documents[row, k]))
        )
        assert info.dense[row, 0, q, k].item() == want, (row, q, k)


def test_fields_describe_the_mask_without_building_it():
    positions = torch.arange(6)
    info = mask_info(positions, DOCUMENTS, 2, dense=False)
    assert info.dense is None
    assert not info.is_causal
    assert info.documents is DOCUMENTS
    assert (info.window, info.seq_len) == (2, 6)
    assert info.positions is positions


def test_sequence_length_with_positions_per_row():
    assert mask_info(torch.zeros(3, 5, dtype=torch.int64), None, None).seq_len == 5
