"""Files in the format of MNIST's, with images of noise."""

import gzip
import struct

import numpy as np


def write_idx(path, values):
    head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    raw = head + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def write_images(folder, *, train, test, size=(3, 2), ending=""):
    rng = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        pixels = rng.integers(256, size=(count, *size))
        write_idx(folder / f"{name}-images-idx3-ubyte{ending}", pixels)
        write_idx(folder / f"{name}-labels-idx1-ubyte{ending}", np.arange(count) % 10)
