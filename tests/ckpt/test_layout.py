"""Who writes what: each value once, evenly, the same however often it is asked."""

from itertools import product
from math import prod

import pytest
import torch

from ptx.ckpt import _layout
from ptx.ckpt._layout import Held, Piece, plan
from ptx.ckpt._slots import Layout, Slot


def held(
    name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Held:
    return Held(name, "float32", shape, (offsets, sizes) if prod(sizes) else None)


def whole(name: str, *shape: int) -> Held:
    return held(name, shape, (0,) * len(shape), shape)


def written(pieces: list[list[Piece]], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """How often each value of a tensor is written."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for piece in (piece for some in pieces for piece in some if piece.name == name):
        offsets, sizes = piece.box
        counts[tuple(slice(a, a + n) for a, n in zip(offsets, sizes))] += 1
    return counts


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_layout, "SHARE_BYTES", 64)


@pytest.mark.usefixtures("small_shares")
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_replicas_write_each_value_once_and_evenly(ranks: int) -> None:
    shapes = {"a": (40, 8), "b": (7,), "c": (), "d": (3, 5, 2), "e": (1, 100)}
    one = [whole(name, *shape) for name, shape in shapes.items()]
    found = plan([one] * ranks)
    for name, shape in shapes.items():
        assert (written(found.pieces, name, shape) == 1).all()
    loads = [sum(prod(p.box[1]) for p in some) for some in found.pieces]
    assert max(loads) <= sum(loads) / ranks + 100  # the row of 100 is not divided
    assert plan([one] * ranks) == found


@pytest.mark.usefixtures("small_shares")
def test_shards_of_replicas() -> None:
    """HSDP 2 x 3 over 7 rows: shards of 3, 3 and 1, each on two ranks; one rank more has nothing."""
    rows = [(0, 3), (3, 3), (6, 1)]
    ranks = [
        [held("w", (7, 50), (start, 0), (count, 50)), whole("s", 4)]
        for _, (start, count) in product(range(2), rows)
    ]
    ranks.append([held("w", (7, 50), (0, 0), (0, 50))])
    found = plan(ranks)
    assert (written(found.pieces, "w", (7, 50)) == 1).all()
    assert (written(found.pieces, "s", (4,)) == 1).all()
    assert found.pieces[6] == []
    rows_of = [sum(p.box[1][0] for p in some if p.name == "w") for some in found.pieces]
    assert sorted(rows_of) == [0, 0, 1, 1, 1, 2, 2]


def test_small_tensors_are_not_divided() -> None:
    found = plan([[whole("a", 10), whole("b", 10)]] * 2)
    assert [len(some) for some in found.pieces] == [1, 1]


def test_pieces_lie_behind_each_other_at_multiples_of_64() -> None:
    found = plan([[whole("a", 3), whole("b", 5, 5), whole("empty", 0, 3)]])
    (pieces,) = found.pieces
    assert [piece.name for piece in pieces] == ["a", "b"]
    assert "empty" in found.tensors
    assert all(piece.start % 64 == 0 for piece in pieces)
    assert pieces[0].start < pieces[0].end < pieces[1].start < pieces[1].end


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [[whole("w", 4)], [whole("w", 5)]],
            r"'w' is torch.float32 \(4,\) on one rank, .* on rank 1",
        ),
        ([[held("w", (4,), (0,), (2,))]], r"'w' \(4,\): the ranks hold 2 different values of 4"),
        ([[held("w", (4,), (0,), (3,))], [held("w", (4,), (1,), (3,))]], "hold 6 different values"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(
    ranks: list[list[Held]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(ranks)


def test_a_slot_holds_the_file_as_it_will_be() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "c": torch.zeros(0)}
    items = _layout.held(tensors)
    (pieces,) = plan([items]).pieces
    layout = Layout(_layout.signature(tensors), pieces, {item.name: item.box for item in items})
    slot = Slot()
    slot.lay_out(layout, 10)
    size = slot.size
    assert size >= layout.data_bytes + 10
    for scale in (1, 2):
        slot.stage({name: tensor * scale for name, tensor in tensors.items()})
        assert slot._map is not None
        data = slot._map[pieces[0].start :]
        assert torch.frombuffer(bytearray(data[:24]), dtype=torch.float32).tolist() == [
            scale * i for i in range(6)
        ]
    slot.lay_out(layout, 20)
    assert slot.size == size  # nothing to do
    slot.free()


def test_signatures_differ_where_layouts_do() -> None:
    one = {"a": torch.zeros(2), "b": torch.zeros(2)}
    same = {"a": torch.ones(2), "b": torch.ones(2)}
    assert _layout.signature(one) == _layout.signature(same)
    for other in (
        {"b": torch.zeros(2), "a": torch.zeros(2)},
        {"a": torch.zeros(2), "b": torch.zeros(3)},
        {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int32)},
        {"a": torch.zeros(2)},
    ):
        assert _layout.signature(one) != _layout.signature(other)
