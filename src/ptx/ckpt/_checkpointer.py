"""Save while training goes on, load on any mesh, and lose nothing."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex

import torch.distributed as dist

from ptx.ckpt import _disk
from ptx.ckpt._agree import vote
from ptx.ckpt._calls import Calls, one_at_a_time
from ptx.ckpt._exit import at_exit_hook, finish_dropped
from ptx.ckpt._in_flight import InFlight
from ptx.ckpt._layout import signature
from ptx.ckpt._match import Options
from ptx.ckpt._options import check_options, checked_step, new_token
from ptx.ckpt._parts import Part, Stateful
from ptx.ckpt._prepare import prepare
from ptx.ckpt._ranks import Ranks
from ptx.ckpt._resume import Source, load_newest
from ptx.ckpt._root import open_root, open_stage
from ptx.ckpt._saves import Save, SaveFailedError, SaveHandle
from ptx.ckpt._slots import Layout
from ptx.ckpt._stage import lay_out, stage
from ptx.ckpt._state import part_of
from ptx.ckpt._store import is_url


class AsyncCheckpointer:
    """Saves states to ``root/step-N`` in the background, and loads them on any mesh.

    A save copies the state into a shared buffer and returns. A process of each rank, which knows
    nothing of torch, writes the buffer with checksums and syncs it; when all ranks' files are
    durable, that of rank 0 commits the step by one rename. So a step is there whole or not at all,
    whoever dies when, and no other thread or process communicates. Each value is written once,
    evenly over the ranks that hold it, in files that torch's DCP reads, too.

    ``with AsyncCheckpointer(...)`` finishes what is in flight at the end, and so does the exit of
    the interpreter, with exit code 1 if it can't. The constructor, ``save``, ``load``, ``poll``,
    ``wait`` and ``close`` are called by all ranks, in the same order; what fails on one raises on
    all. Linux only.

    Args:
        root: A folder that all ranks share, made if need be; or the URL of one, which goes through
            fsspec and needs ``stage_dir``.
        keep: How many of the newest whole steps to keep; older ones are deleted once a newer one is
            committed, but never the one just committed, or one that is being loaded. None: all.
        keep_every: Steps divisible by this are kept as well.
        slots: Buffers, each as large as what this rank writes: how many saves can be in flight.
        on_busy: What a save does while all slots are busy on some rank: wait, or be skipped on all.
        stage_dir: A fast folder of this node, for ranks to share or not. Writers write here first,
            which frees the slot, and copy to ``root`` in the background. Nothing in it is ever
            loaded; it needs room for ``slots`` saves of its ranks.
        process_group: A gloo group of the ranks; None: a new one over all.

    Raises:
        ValueError: An option is out of range, the group can't communicate CPU tensors, fsspec or
            what it needs for the URL isn't installed, or ``stage_dir`` can't be written to.
        RuntimeError: ``root`` can't be made, or isn't the same folder on all ranks.

    Cost: the first save starts the writer and allocates ``slots`` x the state of this rank, each
        page touched; with CUDA, pinned. A later one takes a copy of the state, one all-reduce and
        one all-gather of a few integers.

    Source: the faults this is built against are those of pytorch#144657 (values changed after the
        call), pytorch#133415 (a save that steps the optimizer), torchtitan#4197 (retention before
        durability) and torchtitan#4292 (names of steps).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        slots: int = 2,
        on_busy: Literal["wait", "skip"] = "wait",
        stage_dir: str | os.PathLike[str] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_options(keep, keep_every, slots, on_busy, root, stage_dir)
        self._retention = {"keep": keep, "keep_every": keep_every}
        self._on_busy = on_busy
        self._ranks = Ranks(process_group)
        store = open_root(root, self._ranks)
        stage = open_stage(stage_dir, self._ranks)
        self.root = store.root if is_url(root) else Path(store.root)
        self._flight = InFlight(store, self._ranks, slots, stage)
        self._source = Source(store, stage, self._flight.damaged)
        self._layout: Layout | None = None
        self._meta: Any = None
        self._closed = False
        self._calls = Calls()
        # Both hold no reference to this: who drops it without closing loses nothing either.
        self._at_exit = at_exit_hook(weakref.ref(self), os.getpid())
        self._dropped = weakref.finalize(self, finish_dropped, self._flight, os.getpid())
        self._dropped.atexit = False

    @property
    def meta(self) -> Any:
        """What ``save`` was given with the step that was loaded; None before a load."""
        return self._meta

    @one_at_a_time
    def save(
        self,
        step: SupportsIndex,
        state: Mapping[str, Stateful],
        meta: Any = None,
        block: bool = False,
    ) -> SaveHandle | None:
        """Copy the state of this moment, and return while it is being written.

        Nothing is changed by it: no optimizer state is made, no random number drawn.

        Args:
            step: 0 or more. A step that is there already is replaced, in the moment of the commit.
            state: What `train_state` returns, or any dict of Statefuls and modules. Values may be
                numbers, strings, lists, dicts and so on: what would have to be pickled is refused.
            meta: Any such value, to find as ``meta`` after a load. Rank 0's is kept.
            block: Return only once it is durable.

        Returns:
            A handle with ``done``, ``wait()`` and ``path``; None if it was skipped, see ``on_busy``.

        Raises:
            ValueError: The state can't be saved, or isn't equal on all ranks, by name.
            RuntimeError: The folder can't be written, another job saves to it, or an earlier save
                failed since the last ``poll``; then this one hasn't begun.
        """
        self._require_open("save")
        flight = self._flight
        slot = flight.acquire(wait=self._on_busy == "wait")
        if slot is None:
            return None
        number, ready, folder, error = 0, None, None, None
        token = new_token()
        try:
            number = checked_step(step)
            parts = {key: part_of(key, value, where="save") for key, value in state.items()}
            ready = prepare(parts, meta, self._ranks.rank)
            changed = self._layout is None or self._layout.signature != signature(ready.tensors)
            if self._ranks.rank == 0:
                flight.lock.hold()
                folder = flight.store.attempt(number, token)
                flight.store.make(folder)
        except Exception as problem:
            ready, changed, folder, error = None, False, None, problem
        try:
            split_is_equal, changed, token = vote(
                self._ranks, number, ready, changed=changed, token=token, error=error
            )
            assert ready is not None
            if changed:
                self._layout = lay_out(self._flight, self._ranks, ready)
        except BaseException:
            if folder:
                flight.store.discard(folder)
            raise
        save = flight.add(number, flight.store.attempt(number, token))
        try:
            assert self._layout is not None
            stage(flight, save, slot, self._layout, ready, split_is_equal, self._retention)
        except BaseException as problem:  # the next round tells all ranks
            save.failure = f"{type(problem).__name__}: {problem}"
            if not isinstance(problem, Exception):
                raise
        if block:
            flight.wait_for(save)
        return SaveHandle(save, flight.becomes(save), self._wait_for)

    @one_at_a_time
    def load(
        self,
        state: Mapping[str, Stateful],
        *,
        step: int | None = None,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
        allow_cast: bool = False,
    ) -> int | None:
        """Load a step into live objects, bit for bit, whatever mesh or number of ranks saved it.

        Rank 0 chooses the step. Every byte of it is verified before anything is written. A damaged
        step is reported to the logger "ptx.ckpt", with file, offset and reason, and the next older
        one is taken.

        Args:
            state: As for ``save``, after materialize(..., seed=None) if it was built on meta. Any of
                the saved keys will do: ``{"model": state["model"]}`` loads weights only.
            step: None: the newest that verifies. An explicit one has no substitute.
            allow_missing: Names or globs of what the checkpoint may lack and is then left as it is;
                a dotted prefix means all below it: ``"optimizer"``, ``"model.layers.*.lora_a"``.
            allow_unexpected: The same for what it has and nothing takes.
            allow_cast: Let tensors be converted to the dtypes that they have here.

        Returns:
            The step; None only if no step was ever committed.

        Raises:
            ValueError: There is no such step, or names, shapes or dtypes don't fit: all of them in
                one message, with nothing written.
            RuntimeError: No step verifies, with nothing written; or an object refused its state.

        Cost: on the same mesh each rank reads its own file once; on others also what it needs of
            the other files. Memory for optimizer states that don't exist yet, and no other.
        """
        self._require_open("load")
        error: Exception | None = None
        parts: dict[str, Part] = {}
        try:
            parts = {key: part_of(key, value, where="load") for key, value in state.items()}
        except Exception as problem:
            error = problem
        self._ranks.raise_together(error)
        options = Options(allow_missing, allow_unexpected, allow_cast)
        loaded = load_newest(self._source, self._ranks, parts, step, options)
        if loaded is None:
            return None
        self._meta = loaded.meta
        return loaded.number

    def steps(self) -> list[int]:
        """The committed steps, ascending, as this rank sees the folder."""
        store = self._flight.store
        return sorted({step for step, path in store.folders() if store.has_manifest(path)})

    def latest(self) -> int | None:
        """The newest step with a whole manifest and all files, as this rank sees the folder.

        It was durable before it got its name; its bytes are verified by ``load`` and `verify`.
        """
        store = self._flight.store
        for step, path in store.folders():
            try:
                store.check_sizes(path, store.manifest(path)[1])
            except _disk.DamagedError:
                continue
            return step
        return None

    @one_at_a_time
    def poll(self) -> None:
        """Learn what became of the saves in flight; made to be called after every step.

        Raises:
            RuntimeError: A save failed, on some rank. All ranks raise in the same call: the first
                after that in which the rank noticed. Each failure is raised once; training may go
                on, and later saves are fine if what was wrong is.

        Cost: an all-reduce of three integers that nobody waits for, if a save is in flight; else
            nothing that communicates.
        """
        self._require_open("poll")
        self._flight.poll()

    @one_at_a_time
    def wait(self) -> None:
        """Return once all saves are durable; raises as ``poll`` does."""
        self._require_open("wait")
        self._flight.wait(lambda: not self._flight.pending)

    def close(self) -> None:
        """Finish what is in flight, end the writer, free the buffers; raises as ``poll`` does."""
        if not self._closed and not self._calls.in_fork:  # a fork's close is the parent's affair
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif not self._closed and not self._calls.in_fork:
            # Other ranks may not be here, so nothing that waits for them.
            problems = self._flight.finish_alone()
            for problem in problems:
                sys.stderr.write(f"AsyncCheckpointer: {problem}\n")
            self._shut()
            if problems and isinstance(error, SystemExit) and not error.code:
                raise SystemExit(1) from error

    @one_at_a_time
    def _wait_for(self, save: Save) -> None:
        self._flight.wait_for(save)

    @one_at_a_time
    def _close(self) -> None:
        try:
            if not self._ranks.gone:
                self._flight.wait_for_all()
            elif problems := self._flight.finish_alone():
                raise RuntimeError(f"close: unfinished: {'; '.join(problems)}")
        except SaveFailedError:
            raise
        except BaseException:  # a peer is dead, say; what can be written is written
            self._flight.finish_alone()
            raise
        finally:
            self._shut()

    def _require_open(self, where: str) -> None:
        if self._closed:
            raise ValueError(f"{where}: this AsyncCheckpointer is closed; make a new one")

    def _shut(self) -> None:
        self._closed = True
        atexit.unregister(self._at_exit)
        self._dropped.detach()
        self._flight.close()
        self._ranks.close()
