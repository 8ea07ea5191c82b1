"""What a run leaves behind: a progress line, ``metrics.jsonl`` and ``loss.png``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO


class RunLog:
    """Writes on one rank only; on the others every method does nothing.

    Args:
        folder: Where the files go; created. Files of an earlier run are replaced, or gone on with.
        total_steps: For the time that is left.
        enabled: Whether this is the rank that writes.
    """

    def __init__(self, folder: Path, total_steps: int, *, enabled: bool) -> None:
        self.folder, self.total_steps, self.enabled = folder, total_steps, enabled
        self.records: list[dict[str, float]] = []
        self.started, self.first = time.perf_counter(), 0
        self.file: IO[str] | None = None

    def open(self, step: int, tokens_seen: int) -> None:
        """Begins the file, with the records up to here of the run that goes on after ``step``."""
        if not self.enabled:
            return
        self.started, self.first = time.perf_counter(), step
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if step and path.exists() else []
        self.file = path.open("w")
        for line in lines:
            # The last line of a run that was killed may be half a one.
            if line.endswith("}") and json.loads(line)["train/tokens_seen"] <= tokens_seen:
                self.record(json.loads(line))

    def say(self, text: str) -> None:
        if self.enabled:
            print(text, flush=True)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Appends one line of JSON, readable at once by whoever watches the file."""
        if self.file:
            self.records.append(dict(metrics))
            self.file.write(json.dumps(metrics) + "\n")
            self.file.flush()

    def step(self, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a training step and prints its line."""
        self.record(metrics)
        done = metrics["train/iter"]
        each = (time.perf_counter() - self.started) / (done - self.first)
        left = round(each * (self.total_steps - done))
        self.say(
            f"step {done:5d}/{self.total_steps}  loss {metrics['train/loss']:.4f}"
            f"  {metrics['train/tps']:8,.0f} tokens/s  grad norm {metrics['grad/norm_preclip']:.3f}"
            f"  lr {metrics['opt/lr']:.1e}  ETA {left // 60}:{left % 60:02}"
        )

    def plot(self, baselines: Mapping[str, float]) -> None:
        """Draws the losses over tokens, with a line for each baseline."""
        if not self.enabled:
            return
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for key, marker in [("train/loss", ""), ("valid/loss", "o")]:
            points = [(r["train/tokens_seen"] / 1e6, r[key]) for r in self.records if key in r]
            axes.plot(*zip(*points, strict=True), label=key, marker=marker)
        for style, (name, nats) in zip([":", "--"], baselines.items(), strict=True):
            axes.axhline(nats, color="0.4", linestyle=style, label=f"{name} ({nats:.2f})")
        axes.set(xlabel="million tokens seen", ylabel="loss (nats per token)")
        axes.legend()
        figure.savefig(self.folder / "loss.png", dpi=120)
        plt.close(figure)

    def close(self) -> None:
        if self.file:
            self.file.close()
