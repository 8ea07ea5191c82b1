"""What counting reaches, by hand and on the targets of the validation loss."""

import math

import numpy as np
import pytest
import torch

import baselines
import data


def test_baselines_by_hand():
    train = np.array([0, 1, 0, 1, 0, 2], np.uint16)
    valid = np.array([0, 1, 2, 0], np.uint16)
    # Counts 3, 2, 1 with add-one: 4/9, 3/9, 2/9. Pairs 01, 10 twice, 02 once: D = 1 / (1 + 2 * 2).
    known = (2 - 0.2) / 3 + 0.2 * 2 / 3 * (3 / 9)  # 1 after 0, which two tokens follow
    unseen = 0.2 * 1 / 2 * (2 / 9)  # 2 after 1
    new_context = 4 / 9  # nothing ever followed 2
    got = baselines.baselines(train, valid, 3)
    assert got["uniform"] == pytest.approx(math.log(3))
    assert got["unigram"] == pytest.approx(-math.log(3 / 9 * 2 / 9 * 4 / 9) / 3)
    assert got["bigram"] == pytest.approx(-math.log(known * unseen * new_context) / 3)


@pytest.mark.parametrize("train", [[0, 1, 0, 1, 0, 2, 2, 4], [1, 1, 1, 1], [0, 1, 0, 1, 0]])
def test_baselines_are_distributions(train):
    for kind in ("unigram", "bigram"):
        for context in range(5):
            pairs = [np.array([context, target], np.uint16) for target in range(5)]
            losses = [baselines.baselines(np.array(train, np.uint16), p, 5)[kind] for p in pairs]
            assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1.0)


def test_baselines_average_over_the_labels_of_validation_batches():
    rng = np.random.default_rng(0)
    train, valid = (rng.integers(0, 9, n).astype(np.uint16) for n in (200, 43))
    inputs, labels = zip(*data.validation_batches(valid, 8, 4, 0, 1), strict=True)
    keep = torch.cat(labels) != data.IGNORE_INDEX
    pairs = zip(torch.cat(inputs)[keep].tolist(), torch.cat(labels)[keep].tolist(), strict=True)
    each = [baselines.baselines(train, np.array(pair, np.uint16), 9)["bigram"] for pair in pairs]
    assert len(each) == 42
    assert baselines.baselines(train, valid, 9)["bigram"] == pytest.approx(sum(each) / 42)
