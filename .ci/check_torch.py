"""Say so when a CUDA build of torch was installed on a machine without an accelerator."""

import sys

import torch

if torch.version.cuda and not torch.accelerator.is_available():
    print(
        f"torch {torch.__version__} is a CUDA build, and this machine has no accelerator: install with"
        " `pip install -c constraints-cpu.txt`, from where a CPU build of torch can be had (README.md, Install)",
        file=sys.stderr,
    )
    sys.exit(0 if "--warn" in sys.argv else 1)
