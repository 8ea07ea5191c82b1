"""What the processes of hub.py can be asked to do."""

import hashlib

import torch

import ptx
from hf.answers import answer_calls
from ptx.hf import _hub, hf_folder, load_hf, load_tokenizer


def folder(**arguments):
    return str(hf_folder(**arguments))


def load(repo, mesh=False, asks_once=False, **arguments):
    """A digest of the weights that this rank got."""
    ranks = ptx.build_mesh(device_type="cpu") if mesh else None
    if not asks_once:
        args = ptx.ModelArgs.from_hf(hf_folder(repo, mesh=ranks))
    else:
        args = _args()
    with torch.device("meta"):
        model = ptx.Transformer(args)
    if ranks is not None:
        ptx.apply_fsdp2(model, ptx.fsdp_mesh(ranks))
    load_hf(model, repo, **arguments)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if mesh else parameter
        digest.update(repr(local.detach().flatten().tolist()).encode())
    return digest.hexdigest()


def _args():
    from model.families import args_of

    return args_of("llama2")


def tokenize(repo, text):
    return load_tokenizer(repo).encode(text, bos=True)


def timeout(seconds):
    _hub._TIMEOUT = seconds


if __name__ == "__main__":
    answer_calls(folder, load, tokenize, timeout)
