"""Continue a text with the model being trained, on whatever mesh it lives."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    new_tokens: int,
    seq_len: int,
    device: torch.device,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Samples ``new_tokens`` tokens after ``prompt``.

    Every rank has to call it, with the same arguments: the forward communicates, and all draw the
    same tokens. The window always has ``seq_len`` positions, filled up on the right where causal
    attention does not look, so that sequence parallel can split it.
    """
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    generator = torch.Generator().manual_seed(seed)
    for _ in range(new_tokens):
        window = tokens[-seq_len:]
        padded = torch.tensor([window + [0] * (seq_len - len(window))], device=device)
        logits = model(padded)
        if isinstance(logits, DTensor):  # under tp each rank has some columns
            logits = logits.full_tensor()
        probabilities = (logits[0, len(window) - 1].float().cpu() / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return str(tokenizer.decode(tokens))
