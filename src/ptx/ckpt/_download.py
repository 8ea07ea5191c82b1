"""The chunks of a remote step that this rank needs, each fetched once and verified as it comes."""

from __future__ import annotations

import os
import tempfile

from ptx.ckpt import _disk
from ptx.ckpt._read import Files
from ptx.ckpt._remote import RemoteStore
from ptx.ckpt._step import Step


class Downloads(Files):
    """A remote step's data files, as far as they were checked; kept in unlinked, sparse files.

    Args:
        step: To read.
        store: Where it is.
        folder: With room for what this rank reads.
    """

    def __init__(self, step: Step, store: RemoteStore, folder: str) -> None:
        super().__init__(step)
        self._store = store
        self._folder = folder
        self._fds: dict[str, int] = {}

    def check(self, name: str, chunks: list[int]) -> None:
        entry = self.step.files[name]
        if name not in self._fds:
            with tempfile.TemporaryFile(dir=self._folder) as file:  # gone with its last descriptor
                self._fds[name] = os.dup(file.fileno())
            os.ftruncate(self._fds[name], entry["bytes"])
        for chunk in chunks:
            data = memoryview(self._store.fetch(self.step.folder, entry, chunk))
            at = chunk * _disk.CHUNK_BYTES
            while data:
                done = os.pwrite(self._fds[name], data, at)
                data, at = data[done:], at + done

    def close(self) -> None:
        super().close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _open(self, name: str) -> int:
        return os.dup(self._fds[name])
