"""A model's tokenizer, with the special tokens that are asked for and no other."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptx.hf._hub import hf_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class HfTokenizer:
    """Text to ids and back, straight from ``tokenizer.json``.

    Args:
        tokenizer: Of the tokenizers library, for all else that it can do.
        bos_id: Beginning-of-sequence token, or None.
        eos_id: End-of-sequence token, or None.
        files: The folder or file that it is from.
    """

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None
    files: Path

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. The model may have more rows (padding), never fewer."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of a text, begun and ended by exactly one special token where it is asked for.

        Whatever the file's post-processor would add is left out.

        Args:
            text: Names of special tokens in it become those tokens.
            bos: Begin with one; none is added to a text that begins with its name.
            eos: End with one, likewise.

        Raises:
            ValueError: The tokenizer has no such token.
        """
        return self.encode_batch([text], bos=bos, eos=eos)[0]

    def encode_batch(
        self, texts: Sequence[str], *, bos: bool = False, eos: bool = False
    ) -> list[list[int]]:
        """`encode` of several texts, on all cores."""
        for wanted, token, name in ((bos, self.bos_id, "bos"), (eos, self.eos_id, "eos")):
            if wanted and token is None:
                raise ValueError(f"HfTokenizer: {self.files} names no {name} token")
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._framed(text.ids, bos, eos) for text in found]

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """The text; special tokens by name, or left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))

    def _framed(self, ids: list[int], bos: bool, eos: bool) -> list[int]:
        first = [self.bos_id] if bos and ids[:1] != [self.bos_id] else []
        last = [self.eos_id] if eos and ids[-1:] != [self.eos_id] else []
        return [*first, *ids, *last]  # type: ignore[list-item]  # None was refused


def load_tokenizer(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> HfTokenizer:
    """The tokenizer of a model's folder, or of a repository on the hub.

    Truncation and padding that the file asks for are switched off. The special tokens are those
    of ``tokenizer_config.json``, else of ``config.json``.

    Args:
        path_or_repo: A folder with ``tokenizer.json``, that file, or a repository.
        revision: Branch, tag or commit of a repository.
        token: For a repository that asks for one.

    Raises:
        ValueError: There is no tokenizer.json, or it can't be read; as `hf_folder`.
    """
    from tokenizers import Tokenizer

    path = hf_folder(path_or_repo, revision=revision, token=token)
    file = path if path.is_file() else path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"load_tokenizer: {path} has no tokenizer.json; AutoTokenizer of transformers writes one"
            " by save_pretrained"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more special
        raise ValueError(f"load_tokenizer: {file} can't be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = _json(file.parent / "tokenizer_config.json")
    by_id = _json(file.parent / "config.json")
    bos, eos = (_special(tokenizer, named, by_id, name) for name in ("bos", "eos"))
    return HfTokenizer(tokenizer, bos, eos, path)


def _special(
    tokenizer: Tokenizer, named: dict[str, Any], by_id: dict[str, Any], name: str
) -> int | None:
    token = named.get(f"{name}_token")
    if isinstance(token, dict):  # an AddedToken, written out
        token = token.get("content")
    if isinstance(token, str):
        found: int | None = tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"load_tokenizer: {name}_token={token!r} isn't in the vocabulary")
        return found
    value = by_id.get(f"{name}_token_id")
    # Several ends of a turn, the text's own first.
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else None


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"load_tokenizer: {file} is no JSON: {error}") from error
    return value if isinstance(value, dict) else {}
