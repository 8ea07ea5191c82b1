"""Digits as pixel tokens, from files in the format of MNIST."""

import gzip

import numpy as np
import pytest

from examples.idx_files import write_idx, write_images
from images import PIXELS, Images, find_images, image_tokens, read_idx, read_images


def test_tokens_by_hand():
    pixels = np.array([[[0, 255], [7, 8]], [[1, 2], [3, 4]]], np.uint8)
    tokens = image_tokens(Images(pixels, np.array([9, 0], np.uint8)), 10)
    end = PIXELS + 10
    assert tokens.tolist() == [PIXELS + 9, 0, 255, 7, 8, end, PIXELS, 1, 2, 3, 4, end]
    assert tokens.dtype == np.uint16


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_files_are_found_and_read(tmp_path, ending):
    write_images(tmp_path, train=5, test=3, ending=ending)
    files = find_images(tmp_path)
    images = read_images(*files[:2])
    assert images.pixels.shape == (5, 3, 2)
    assert images.classes.tolist() == [0, 1, 2, 3, 4]
    want = np.random.default_rng(0).integers(256, size=(5, 3, 2))
    assert np.array_equal(images.pixels, want)
    assert read_images(*files[2:], limit=2).classes.tolist() == [0, 1]


def test_missing_files_are_named_with_where_they_are_from(tmp_path):
    write_images(tmp_path, train=5, test=3)
    dotted = tmp_path / "t10k-images-idx3-ubyte"
    dotted.rename(tmp_path / "t10k-images.idx3-ubyte")
    assert find_images(tmp_path)[2].name == "t10k-images.idx3-ubyte"
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"lacks train-labels-idx1-ubyte \(or .* MNIST/raw that"):
        find_images(tmp_path)
    with pytest.raises(ValueError, match=r"absent lacks train-images.*, t10k-labels"):
        find_images(tmp_path / "absent")


def test_damaged_files_are_refused(tmp_path):
    images = write_idx(tmp_path / "images", np.zeros((3, 2, 2)))
    labels = write_idx(tmp_path / "labels", np.zeros(4))
    with pytest.raises(ValueError, match=r"images holds \(3, 2, 2\) and .*labels holds \(4,\)"):
        read_images(images, labels)
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"has 11 values for dims \(3, 2, 2\)"):
        read_idx(images)
    images.write_bytes(b"\x00\x00\x08\x03\x00\x00")
    with pytest.raises(ValueError, match="damaged"):
        read_idx(images)
    images.write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="begins with b'GIF8', not as idx"):
        read_idx(images)
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(bytes(99))[:-9])
    with pytest.raises(ValueError, match=r"a.gz can't be decompressed"):
        read_idx(packed)
