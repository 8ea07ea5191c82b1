"""Rebuilds corpus.txt.xz and tokenizer.json from the package that SOURCE.md names."""

from __future__ import annotations

import argparse
import hashlib
import lzma
import tarfile
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"  # id 0


def build(source: Path, out: Path) -> None:
    """Writes ``out/corpus.txt.xz`` and ``out/tokenizer.json``.

    Args:
        source: The package as ``npm pack`` saves it (.tgz), or a folder that holds its extracted
            ``sotu/data/*.txt``.
        out: Folder to write into.

    Cost: about 10 s on one core for the compression, about 10 s for the tokenizer.
    """
    addresses = read_addresses(source)
    text = "".join(f"{name}\t{address}\n" for name, address in sorted(addresses.items()))
    raw = text.encode()
    (out / "corpus.txt.xz").write_bytes(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
    texts = [addresses[name] for name in sorted(addresses)]
    (out / "tokenizer.json").write_text(train_tokenizer(texts), encoding="utf-8")
    print(f"{len(addresses)} addresses, {len(raw)} bytes, sha256 {hashlib.sha256(raw).hexdigest()}")
    for file in ("corpus.txt.xz", "tokenizer.json"):
        data = (out / file).read_bytes()
        print(f"{file}: {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


def read_addresses(source: Path) -> dict[str, str]:
    """Reads the addresses by file name without suffix, e.g. ``1790_george_washington_n``.

    Raises:
        ValueError: ``source`` holds no address, or one that would not fit on a line.
    """
    if source.is_dir():
        found = {path.stem: path.read_bytes() for path in source.rglob("sotu/data/*.txt")}
    else:
        found = {}
        with tarfile.open(source) as package:
            for member in package:
                path = Path(member.name)
                if path.match("sotu/data/*.txt") and (file := package.extractfile(member)):
                    found[path.stem] = file.read()
    if not found:
        raise ValueError(f"read_addresses: no sotu/data/*.txt in {source}; give the package")
    addresses = {name: data.decode().strip() for name, data in found.items()}
    if broken := [name for name, text in addresses.items() if "\n" in text or "\t" in text]:
        raise ValueError(f"read_addresses: tab or newline inside {broken}; the format has none")
    return addresses


def train_tokenizer(texts: Iterable[str]) -> str:
    """Trains a byte-level BPE of ``VOCAB_SIZE`` entries; the same texts give the same JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes, so that any text encodes.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="the package: its .tgz, or extracted")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    build(arguments.source, arguments.out)
