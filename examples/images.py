"""Digits as sequences of pixel tokens, from the idx files of MNIST and its relatives."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

PIXELS = 256  # ids of the grey values; classes come after them, the end of an image last
_UBYTE = 8  # the idx code of unsigned bytes
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "valid": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class Images:
    """Images and their classes.

    Args:
        pixels: [n, height, width], uint8.
        classes: [n], uint8.
    """

    pixels: npt.NDArray[np.uint8]
    classes: npt.NDArray[np.uint8]


def find_images(folder: Path) -> list[Path]:
    """The four files of ``folder``: images and labels to train on, images and labels to test on.

    Raises:
        ValueError: Some are missing; the message names them, and where they are from.
    """
    wanted = [name for names in _FILES.values() for name in names]
    found = {name: _named(folder, name) for name in wanted}
    missing = [name for name, file in found.items() if file is None]
    if missing:
        raise ValueError(
            f"find_images: {folder} lacks {', '.join(missing)} (or the same with .gz); MNIST's four"
            " files are on its page, yann.lecun.com/exdb/mnist, and in the folder MNIST/raw that"
            " torchvision.datasets.MNIST(root, download=True) makes"
        )
    return [file for file in found.values() if file is not None]


def read_images(images: Path, labels: Path, *, limit: int = 0) -> Images:
    """Reads a file of images and one of their labels; the first ``limit``, unless that is 0.

    Raises:
        ValueError: A file isn't idx of unsigned bytes, is cut off, or the two don't go together.
    """
    pixels, classes = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or pixels.size == 0 or classes.shape != pixels.shape[:1]:
        raise ValueError(
            f"read_images: {images} holds {pixels.shape} and {labels} holds {classes.shape}; they"
            " must be [n, height, width] and [n]"
        )
    return Images(pixels[: limit or None], classes[: limit or None])


def read_idx(file: Path) -> npt.NDArray[np.uint8]:
    """Reads an idx file of unsigned bytes, compressed or not.

    The format: two zero bytes, a code for the type, the number of dims; the dims, 4 bytes each,
    the most significant first; then the values.
    """
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"read_idx: {file} can't be decompressed: {error}") from error
    if len(raw) < 4 or raw[:3] != bytes([0, 0, _UBYTE]):
        raise ValueError(f"read_idx: {file} begins with {raw[:4]!r}, not as idx of unsigned bytes")
    head = 4 + 4 * raw[3]
    shape = tuple(int.from_bytes(raw[at : at + 4], "big") for at in range(4, head, 4))
    if len(raw) != head + math.prod(shape):
        raise ValueError(
            f"read_idx: {file} has {max(len(raw) - head, 0)} values for dims {shape}; it is damaged"
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def image_tokens(images: Images, n_classes: int) -> npt.NDArray[np.uint16]:
    """One image after the other: its class, its pixels row by row, the end token.

    With the class first the model draws the digit it is told to. A window of
    ``height * width + 2`` tokens is exactly one image.

    Args:
        images: With n images.
        n_classes: Classes are ids 256 to 255 + n_classes; the end is 256 + n_classes.

    Returns:
        [n * (height * width + 2)].
    """
    count = len(images.classes)
    rows = np.empty((count, images.pixels[0].size + 2), np.uint16)
    rows[:, 0] = PIXELS + images.classes.astype(np.uint16)
    rows[:, 1:-1] = images.pixels.reshape(count, -1)
    rows[:, -1] = PIXELS + n_classes
    return rows.reshape(-1)


def _named(folder: Path, name: str) -> Path | None:
    # Some copies write a dot for the second dash.
    dotted = name.replace("-idx", ".idx")
    names = (name, dotted, f"{name}.gz", f"{dotted}.gz")
    return next((folder / file for file in names if (folder / file).is_file()), None)
