"""What the processes of dataset_hub.py can be asked to do; each line of input is a call."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hub_dataset
from data import load_data


def load(source, cache, **options):
    """What this rank got, and what it was told meanwhile."""
    said = []
    data = load_data(source, Path(cache), say=said.append, **options)
    ends = [int((part == data.end_id).sum()) for part in (data.train, data.valid)]
    text = data.tokenizer.decode(data.train.tolist(), skip_special_tokens=False)
    return {"digest": data.digest, "documents": ends, "text": text, "said": said}


def timeout(seconds):
    hub_dataset._TIMEOUT = seconds


def join(file, rank, world):
    store = dist.FileStore(file, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        start = time.monotonic()
        try:
            answer = {"value": globals()[name](**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer["seconds"] = time.monotonic() - start
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
