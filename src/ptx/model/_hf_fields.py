"""The fields of a transformers configuration, of which none may go unnoticed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What a forward without a cache doesn't depend on: where a model is from, how it is called, and
# how text is generated with it.
_IGNORED_NAMES = """
_attn_implementation _attn_implementation_autoset _name_or_path attn_implementation auto_map dtype
finetuning_task id2label initializer_range is_llama_config label2id name_or_path num_labels
pretraining_tp problem_type return_dict task_specific_params tokenizer_class torch_dtype
transformers.js_config transformers_version unsloth_fixed use_cache

bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores pad_token_id
prefix remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens
temperature top_k top_p typical_p
"""
_IGNORED = frozenset(_IGNORED_NAMES.split())
# What has to be off, or as it is in `Transformer`, if it is there at all.
_OFF: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_dropout": (0,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (),
    "hidden_act": ("silu", "swish"),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({},),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "tf_legacy_loss": (False,),
    "tie_encoder_decoder": (False,),
    "torchscript": (False,),
    "use_bfloat16": (False,),
    "use_mrope": (False,),
}


def read_config(config: object) -> dict[str, Any]:
    """A configuration object, a dict or a path, as a dict of its own.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"ModelArgs.from_hf: {str(config)!r} is no config.json and no folder with one;"
                " ptx.hf_folder(...) downloads a repository of the hub"
            )
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"ModelArgs.from_hf: {file} is no JSON: {error}") from error
    elif callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(
            f"ModelArgs.from_hf: a {type(config).__name__} is no configuration; pass transformers'"
            " own, its dict, or the path of a config.json"
        )
    return dict(config)


class Fields:
    """A configuration from which each field is taken once; what is left was not understood."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._left = values
        self.problems: list[str] = []

    def take(self, name: str, absent: Any = None, *, null: Any = ...) -> Any:
        """The field's value; a null is taken for ``null``, or as if it were absent."""
        if name not in self._left:
            return absent
        value = self._left.pop(name)
        return value if value is not None else (absent if null is ... else null)

    def need(self, name: str) -> Any:
        """The field's value; without it there is a problem."""
        value = self.take(name)
        if value is None:
            self.problems.append(f"{name} is missing")
            return 1
        return value

    def not_understood(self) -> list[str]:
        """What is left and isn't known to change nothing, each with its value."""
        found = []
        for name, value in self._left.items():
            allowed = _OFF.get(name)
            if allowed is not None and value is not None and value not in allowed:
                wanted = " or ".join(map(repr, allowed)) or "null"
                found.append(f"{name}={value!r}, only {wanted} is the same as ptx.Transformer")
            elif allowed is None and name not in _IGNORED and value is not None:
                found.append(
                    f"{name}={value!r} isn't known; if it changes nothing, pass a dict without it"
                )
        return found
