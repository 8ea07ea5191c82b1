"""The part of a save that training waits for: the copy into a slot, and the order to write it."""

from __future__ import annotations

from ptx.ckpt._agree import new_layout
from ptx.ckpt._in_flight import InFlight
from ptx.ckpt._prepare import Prepared
from ptx.ckpt._ranks import Ranks
from ptx.ckpt._saves import Save
from ptx.ckpt._slots import Layout


def lay_out(flight: InFlight, ranks: Ranks, ready: Prepared) -> Layout:
    """Agree on who writes what, and allocate for it; raises on all ranks if one has no memory."""
    error: Exception | None = None
    layout = new_layout(ranks, ready)
    try:
        flight.lay_out(layout, len(layout.index) + len(layout.dcp))
    except Exception as problem:
        error = problem
    ranks.raise_together(error)
    return layout


def stage(
    flight: InFlight,
    save: Save,
    slot: int,
    layout: Layout,
    ready: Prepared,
    split_is_equal: bool,
    retention: dict[str, int | None],
) -> None:
    """Copy the state into the slot, and have it written."""
    ranks = flight.ranks
    sections = [ready.own_section(split_is_equal)]
    if ranks.rank == 0:
        body = ready.body(save.step, save.folder, ranks.size, split_is_equal, layout.index)
        sections += [body, layout.dcp]
    buffer = flight.slots[slot]
    buffer.lay_out(layout, sum(map(len, sections)))
    buffer.stage(ready.tensors)
    flight.write(save, slot, sections, {"data_bytes": layout.data_bytes, **retention})
