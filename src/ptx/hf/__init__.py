"""Hugging Face checkpoints, straight into and out of sharded models."""

from ptx.hf._hub import hf_folder as hf_folder
from ptx.hf._interleaved import convert_interleaved as convert_interleaved
from ptx.hf._interleaved import half_split_rows as half_split_rows
from ptx.hf._interleaved import interleaved_rows as interleaved_rows
from ptx.hf._load import hf_report as hf_report
from ptx.hf._load import load_hf as load_hf
from ptx.hf._report import HfReport as HfReport
from ptx.hf._save import save_hf as save_hf
from ptx.hf._tokens import HfTokenizer as HfTokenizer
from ptx.hf._tokens import load_tokenizer as load_tokenizer

__all__ = [
    "HfReport",
    "HfTokenizer",
    "convert_interleaved",
    "half_split_rows",
    "hf_folder",
    "hf_report",
    "interleaved_rows",
    "load_hf",
    "load_tokenizer",
    "save_hf",
]
