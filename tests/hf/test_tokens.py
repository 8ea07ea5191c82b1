"""Special tokens: those asked for, exactly once, whatever the tokenizer's file would add."""

import json
import math

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import nn

import ptx
from ptx.hf import load_tokenizer

VOCAB = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}


@pytest.fixture
def folder(tmp_path):
    """A tokenizer whose post-processor begins each text with <s>, and that would cut and pad."""
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config(tmp_path, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    return tmp_path


def config(folder, **fields):
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_M09_special_tokens_are_there_exactly_once(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a b") == [2, 3]
    assert tokenizer.encode("a b", bos=True) == [0, 2, 3]
    assert tokenizer.encode("a b", bos=True, eos=True) == [0, 2, 3, 1]
    assert tokenizer.encode("a b", eos=True) == [2, 3, 1]
    assert tokenizer.encode("<s> a b </s>", bos=True, eos=True) == [0, 2, 3, 1]
    assert tokenizer.encode("", bos=True, eos=True) == [0, 1]
    assert tokenizer.encode_batch(["a", "b a"], eos=True) == [[2, 1], [3, 2, 1]]
    # The file itself would begin with one, cut and pad.
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a b b b").ids[:3] == [
        0,
        2,
        3,
    ]
    assert tokenizer.encode("a b b b a") == [2, 3, 3, 3, 2]
    assert tokenizer.decode([0, 2, 3]) == "<s> a b"
    assert tokenizer.decode([0, 2, 3], special=False) == "a b"


def test_where_special_tokens_are_named(folder):
    assert (load_tokenizer(folder).bos_id, load_tokenizer(folder).eos_id) == (0, 1)
    config(folder, bos_token=None, eos_token="b")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 3)
    with pytest.raises(ValueError, match="names no bos token"):
        tokenizer.encode("a", bos=True)
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 3]}))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    config(folder, bos_token="<bos>")
    with pytest.raises(ValueError, match="bos_token='<bos>' isn't in the vocabulary"):
        load_tokenizer(folder)


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="can't be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="doesn't exist"):
        load_tokenizer(tmp_path / "absent")


def test_M11_a_vocabulary_of_a_tokenizer_and_a_padded_model(folder):
    """Tokens added behind a hole count; the model's other rows get no probability."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 4
    tokenizer.tokenizer.add_tokens(["c", "d"])
    assert tokenizer.vocab_size == 6
    hidden, head = torch.zeros(3, 5), nn.Linear(5, 8, bias=False)
    labels = torch.tensor([0, 5, 2])
    loss = ptx.fused_linear_ce(hidden, head, labels, vocab_size=tokenizer.vocab_size)
    assert loss.item() == pytest.approx(math.log(6))
