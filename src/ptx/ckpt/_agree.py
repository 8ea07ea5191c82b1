"""What the ranks settle at a save, by small collectives: that all are ready, and who writes what."""

from __future__ import annotations

from ptx.ckpt import _disk
from ptx.ckpt._layout import held, index_json, plan, signature
from ptx.ckpt._prepare import Prepared
from ptx.ckpt._ranks import Ranks
from ptx.ckpt._slots import Layout
from ptx.ckpt._zip import dcp_metadata


def vote(
    ranks: Ranks,
    step: int,
    ready: Prepared | None,
    *,
    changed: bool,
    token: int,
    error: Exception | None,
) -> tuple[bool, bool, int]:
    """Raise on all ranks unless all are ready for the same save.

    Args:
        ranks: All of them call this.
        step: That is to be saved.
        ready: None if this rank can't, for want of ``error``.
        changed: Whether this rank needs a new layout.
        token: Any number, which makes the attempt's folder a new one.
        error: Of this rank.

    Returns:
        Whether all have equal values of what is split over ranks, whether some rank needs a new
        layout, and rank 0's token.

    Raises:
        ValueError: Ranks save different steps, or a state that should be equal isn't.
    """
    row = [int(ready is not None), 0, 0, 0, int(changed), token]
    if ready is not None:
        split = {key: ready.hashes[key] for key in ready.split}
        row[1:4] = [step, ready.hash_of(ready.agreed()), ready.hash_of(split)]
    rows = ranks.gather(row)
    if not all(is_ready for is_ready, *_ in rows):
        raise ranks.joined(error) from error
    assert ready is not None
    if len(steps := {row[1] for row in rows}) > 1:
        raise ValueError(f"save: the ranks save different steps, {sorted(steps)}; pass the same")
    if len({row[2] for row in rows}) > 1:
        raise _difference(ranks.gather_objects(ready.agreed()))
    split_is_equal = len({row[3] for row in rows}) == 1
    if not split_is_equal:
        _compare(ranks.gather_objects(ready.digests))
    return split_is_equal, any(row[4] for row in rows), rows[0][5]


def new_layout(ranks: Ranks, ready: Prepared) -> Layout:
    """Divide the tensors over the ranks: a gather and a scatter of what each has.

    Raises:
        ValueError: The ranks' tensors don't make up whole ones. On all ranks.
    """
    error: Exception | None = None
    whole, mine = None, []
    try:
        mine = held(ready.tensors)
    except Exception as problem:
        error = problem
    ranks.raise_together(error)
    by_rank = ranks.gather_to_first(mine)
    if ranks.rank == 0:
        try:
            whole = plan(by_rank)
        except Exception as problem:
            error = problem
    ranks.raise_together(error)
    pieces = ranks.scatter_from_first(whole.pieces if whole else None)
    layout = Layout(signature(ready.tensors), pieces, {item.name: item.box for item in mine})
    if whole:
        layout.index = index_json(whole)
        layout.dcp = dcp_metadata(whole.tensors, whole.pieces, _disk.data_file)
    return layout


def _compare(by_rank: list[dict[str, int]]) -> None:
    """Raise ValueError if two ranks have different bits under one name."""
    first: dict[str, tuple[int, int]] = {}
    for rank, digests in enumerate(by_rank):
        for name, digest in digests.items():
            other, known = first.setdefault(name, (rank, digest))
            if known != digest:
                raise ValueError(
                    f"save: the buffer {name!r} differs between ranks {other} and {rank}, and only one"
                    " could be kept; synchronise it (SyncBatchNorm), or broadcast it before saving"
                )


def _difference(by_rank: list[dict[str, int]]) -> ValueError:
    first = by_rank[0]
    for rank, hashes in enumerate(by_rank):
        for key in sorted(hashes.keys() | first.keys()):
            if (key in hashes) != (key in first):
                only = rank if key in hashes else 0
                return ValueError(
                    f"save: {key!r} differs between rank 0 and rank {rank}: only rank {only} has it;"
                    " save the same keys on all ranks"
                )
            if hashes.get(key) != first.get(key):
                return ValueError(
                    f"save: {key!r} differs between rank 0 and rank {rank}; make the ranks agree, or"
                    f" pass {key}=PerRank(...) if they can't"
                )
    return ValueError("save: the ranks' states differ")
