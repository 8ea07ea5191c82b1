"""Arguments of the reference example for tests, as one writes them on the command line."""

import lzma

from arguments import parse
from data import CORPUS


def flags_of(**options):
    """``{"grad_accum": 4, "resume": False}`` as flags."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *value]
        else:
            flags.append(f"--{flag}={value}")
    return flags


def args_of(**options):
    return parse(flags_of(**options))


def write_small_corpus(path):
    """Twelve addresses, cut short."""
    with lzma.open(CORPUS, "rt") as whole, lzma.open(path, "wt", preset=0) as some:
        some.writelines(line[:6000] + "\n" for line, _ in zip(whole, range(12)))
    return path
