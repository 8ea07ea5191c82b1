"""Losses of plain and vocabulary-sharded logits, every token weighing the same."""

from ptx.loss._chunked import chunked_ce as chunked_ce
from ptx.loss._cross_entropy import cross_entropy as cross_entropy
from ptx.loss._fused_linear import fused_linear_ce as fused_linear_ce
from ptx.loss._token_logprobs import token_logprobs as token_logprobs
from ptx.loss._token_scale import token_mean as token_mean
from ptx.loss._token_scale import token_scale as token_scale
from ptx.loss._vocab_parallel import vocab_parallel_ce as vocab_parallel_ce

__all__ = [
    "chunked_ce",
    "cross_entropy",
    "fused_linear_ce",
    "token_logprobs",
    "token_mean",
    "token_scale",
    "vocab_parallel_ce",
]
