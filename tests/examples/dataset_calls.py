"""What the processes of dataset_hub.py can be asked to do."""

from pathlib import Path

import hub_dataset
from data import load_data
from hf.answers import answer_calls


def load(source, cache, **options):
    """What this rank got, and what it was told meanwhile."""
    said = []
    data = load_data(source, Path(cache), say=said.append, **options)
    ends = [int((part == data.end_id).sum()) for part in (data.train, data.valid)]
    text = data.tokenizer.decode(data.train.tolist(), skip_special_tokens=False)
    return {"digest": data.digest, "documents": ends, "text": text, "said": said}


def timeout(seconds):
    hub_dataset._TIMEOUT = seconds


if __name__ == "__main__":
    answer_calls(load, timeout)
