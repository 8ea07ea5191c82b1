"""Documents in one window: each as if it were alone."""

from dataclasses import replace

import pytest
import torch

import ptx
from harness import distributed
from packing import document_ids, document_positions

END = 0


def test_ids_and_positions_by_hand():
    tokens = torch.tensor([[5, 6, END, 7, END, END, 8], [END, 5, 5, 5, 5, 5, END]])
    documents = document_ids(tokens, END)
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert documents.dtype == torch.int64
    positions = document_positions(documents)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    args = replace(ptx.preset("debug"), n_layers=2, vocab_size=64, max_seq_len=32)
    model = ptx.Transformer(args)
    model.init_weights()
    return model


@pytest.mark.parametrize("restart", [False, True])
def test_logits_of_a_packed_window_are_those_of_each_document_alone(model, restart):
    torch.manual_seed(1)
    documents = [
        torch.cat([torch.randint(1, 64, (n,)), torch.tensor([END])]) for n in (9, 0, 14)
    ] + [torch.randint(1, 64, (6,))]  # the last goes on in the next window
    window = torch.cat(documents)[None]
    ids = document_ids(window, END)
    positions = document_positions(ids) if restart else None
    packed = model(window, documents=ids, positions=positions)[0]
    alone = torch.cat([model(document[None])[0] for document in documents])
    assert (packed - alone).abs().max() <= 1e-5 * alone.abs().max()
    # And the mask is what does it.
    assert (model(window)[0] - alone).abs().max() > 1e-2 * alone.abs().max()


@distributed(world_size=2)
def test_ranks_that_share_each_matrix_mask_alike(model):
    torch.manual_seed(1)
    window = torch.randint(1, 64, (2, 32))
    window[0, 11] = window[1, 30] = END
    documents = document_ids(window, END)
    with torch.no_grad():
        want = model(window, documents=documents)
        ptx.apply_tp(model, ptx.build_mesh(device_type="cpu", tp=2)["tp"])
        got = model(window, documents=documents).full_tensor()
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
