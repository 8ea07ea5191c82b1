"""Text to tokens: nothing added but what was asked for, and nothing cut off."""

import json
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import data
import ptx
import tokenise
from tokenise import encode, hold_out, load_vocabulary, write_tokens


class Written:
    """A TokenFile in memory."""

    def __init__(self):
        self.tokens = []

    @property
    def length(self):
        return len(self.tokens)

    def append(self, tokens):
        self.tokens += tokens.tolist()


@pytest.fixture
def model(tmp_path):
    """A folder of a model whose tokenizer would frame, cut and fill up what it encodes."""
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<|endoftext|>": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def encoded(texts, vocabulary):
    return [ids.tolist() for ids in encode(texts, vocabulary)]


def test_M09_documents_end_once_and_begin_without_what_a_post_processor_adds(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.encode("a b a b").ids == [0, 2, 1, 0, 0, 0, 0, 0]
    vocabulary = load_vocabulary(model)
    assert encoded(["a b a b a", "b"], vocabulary) == [[2, 3, 2, 3, 2, 1], [3, 1]]
    assert encoded(["<s> a </s>"], vocabulary) == [[0, 2, 1]]


def test_M09_a_beginning_is_added_once_if_asked_for(model):
    vocabulary = load_vocabulary(model, bos=True)
    assert encoded(["a b", "<s> b </s>"], vocabulary) == [[0, 2, 3, 1], [0, 3, 1]]
    assert vocabulary.digest != load_vocabulary(model).digest
    with pytest.raises(ValueError, match="names no bos_token"):
        load_vocabulary(data.TOKENIZER, bos=True)


def test_the_end_is_the_tokenizers_own(model):
    assert load_vocabulary(model).end_id == 1
    assert load_vocabulary(ptx.load_tokenizer(model)).end_id == 1
    assert load_vocabulary(model, end_of_text="b").end_id == 3
    (model / "tokenizer_config.json").unlink()
    assert load_vocabulary(model).end_id == 4  # no file names one, and this is an entry
    with pytest.raises(ValueError, match="has no token '<eos>'"):
        load_vocabulary(model, end_of_text="<eos>")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"no token '<\|endoftext\|>' and names no eos_token"):
        load_vocabulary(model)


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_have_as_many_bits_as_they_need(tmp_path, size, dtype):
    entries = {str(i): i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token="0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(f"{size - 1}\n" * 6)
    loaded = data.load_data(
        str(tmp_path / "a.txt"), tmp_path, text_unit="line", tokenizer=tmp_path, end_of_text="7"
    )
    assert loaded.train.dtype == dtype
    assert loaded.vocab_size == size
    assert loaded.train.tolist() == [size - 1, 7] * 5


def test_encoding_comes_back_unchanged():
    vocabulary = load_vocabulary(data.TOKENIZER)
    assert (vocabulary.size, vocabulary.end_id) == (4096, 0)
    texts = ["Fellow citizens, " * 99, "naïve — “quotes” \n\t\x00 日本語 🎉"]
    tokens = np.concatenate(list(encode(texts, vocabulary)))
    ends = np.flatnonzero(tokens == vocabulary.end_id)
    assert ends[-1] == len(tokens) - 1
    parts = [tokens[a + 1 : b] for a, b in pairwise([-1, *ends])]
    assert vocabulary.tokenizer.decode_batch([part.tolist() for part in parts]) == texts


@pytest.mark.parametrize("batch", [1, 10, 2**23])
def test_batches_change_nothing(model, monkeypatch, batch):
    monkeypatch.setattr(tokenise, "_BATCH", batch)
    monkeypatch.setattr(tokenise, "_SAY_EVERY", 0.0)
    train, valid, said = Written(), Written(), []
    texts = ["a " * i for i in range(1, 8)]
    vocabulary = load_vocabulary(model)
    counts = write_tokens(hold_out(texts, 3), vocabulary, train, valid, said.append)
    assert counts == (5, 2)
    assert train.tokens == [t for i in (1, 3, 4, 6, 7) for t in [2] * i + [1]]
    assert valid.tokens == [t for i in (2, 5) for t in [2] * i + [1]]
    assert said[-1] == "tokenised 7 documents, 0.0 M tokens so far"
