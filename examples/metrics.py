"""What a run leaves behind: ``metrics.jsonl``, what trackers make of it, and the line one watches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from progress import Progress
from report import plot_losses
from trackers import TrackerName, Trackers


class RunLog:
    """Writes on one rank only; on the others every method does nothing.

    Args:
        folder: Where the files go; created. Files of an earlier run are replaced, or gone on with.
        total_steps: For the time that is left.
        enabled: Whether this is the rank that writes.
        trackers: Where metrics go besides; see `Trackers`.
        config: The run's arguments, for ``config.json`` and the trackers.
    """

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        *,
        enabled: bool,
        trackers: Sequence[TrackerName] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.total_steps, self.enabled = folder, total_steps, enabled
        self.names, self.config = trackers, dict(config or {})
        self.records: list[dict[str, float]] = []
        self.notes: dict[str, dict[str, Any]] = {}
        self.progress = Progress(total_steps)
        self.trackers = Trackers((), folder)
        self.last = 0  # step
        self.file: IO[str] | None = None

    def open(self, step: int, tokens_seen: int) -> None:
        """Begins the file, with the records up to here of the run that goes on after ``step``."""
        if not self.enabled:
            return
        self.progress, self.last = Progress(self.total_steps, done=step), step
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if step and path.exists() else []
        self.file = path.open("w")
        for line in lines:
            # The last line of a run that was killed may be half a one.
            if line.endswith("}") and json.loads(line).get("train/tokens_seen", 0) <= tokens_seen:
                self._append(json.loads(line))
        if self.config:
            self.note("config", self.config)
        self.trackers = Trackers(self.names, self.folder, config=self.config, step=step)
        if step:
            self.record({"train/tokens_seen": tokens_seen, "train/resumed_from": step})

    def say(self, text: str) -> None:
        if self.enabled:
            self.progress.say(text)

    def record(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends one line of JSON, readable at once by whoever watches the file; and to trackers.

        Args:
            metrics: With "train/tokens_seen", or the record stays whatever a later run goes on from.
            step: For the trackers; None: "train/iter", else the last one that was logged.
        """
        if self.file:
            self.last = int(step or metrics.get("train/iter", self.last))
            self._append(metrics)
            self.trackers.log(metrics, self.last)

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes ``name``.json, for what isn't a number of a step: configuration, precision."""
        if self.file:
            self.notes[name] = json.loads(json.dumps(dict(values), default=str))
            text = json.dumps(self.notes[name], indent=2) + "\n"
            (self.folder / f"{name}.json").write_text(text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a training step and shows its line."""
        self.record(metrics)
        if self.enabled:
            self.progress.step(
                int(metrics["train/iter"]),
                f"loss {metrics['train/loss']:.4f}  {metrics['train/tps']:8,.0f} tokens/s"
                f"  grad norm {metrics['grad/norm_preclip']:.3f}  lr {metrics['opt/lr']:.1e}",
            )

    def plot(self, baselines: Mapping[str, float]) -> None:
        """Draws the losses over tokens, with a line for each baseline."""
        if self.enabled:
            plot_losses(self.folder / "loss.png", self.records, baselines)

    def close(self) -> None:
        if self.file:
            self.progress.close()
            self.trackers.close()
            self.file.close()
            self.file = None

    def _append(self, metrics: Mapping[str, float | None]) -> None:
        # JSON has no NaN; a reader that isn't Python's would stop at one.
        clean = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in metrics.items()
        }
        self.records.append({k: math.nan if v is None else v for k, v in clean.items()})
        assert self.file is not None
        self.file.write(json.dumps(clean) + "\n")
        self.file.flush()
