"""Where metrics go besides metrics.jsonl: CSV, TensorBoard, W&B, trackio; none of them stops training."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

TrackerName = Literal["csv", "tensorboard", "wandb", "trackio"]
PACKAGES: dict[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """All that a tracker of one's own needs."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Several as one. One that fails is named on stderr, once, and dropped.

    Args:
        names: Which to open.
        folder: The run's; all files go there.
        project: The heading that W&B and trackio list runs under.
        config: The run's arguments, for those that show them.
        step: The run goes on after this step; what a tracker has of later ones is replaced.
        more: Open trackers of one's own.
    """

    def __init__(
        self,
        names: Sequence[TrackerName],
        folder: Path,
        *,
        project: str = "ptx",
        config: Mapping[str, Any] | None = None,
        step: int = 0,
        more: Sequence[Tracker] = (),
    ) -> None:
        makers: dict[str, Callable[[], Tracker]] = {
            "csv": partial(CsvTracker, folder / "metrics.csv", step),
            "tensorboard": partial(TensorBoardTracker, folder / "tensorboard", step),
            "wandb": partial(WandbTracker, folder, project, config or {}, step),
            "trackio": partial(TrackioTracker, folder, project, config or {}, step),
        }
        self.open: dict[str, Tracker] = {type(own).__name__: own for own in more}
        for name in names:
            self._safely(name, partial(self._open, name, makers[name]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, tracker in list(self.open.items()):
            self._safely(name, partial(tracker.log, metrics, step))

    def close(self) -> None:
        for name, tracker in list(self.open.items()):
            self._safely(name, tracker.close)
        self.open.clear()

    def _open(self, name: str, make: Callable[[], Tracker]) -> None:
        self.open[name] = make()

    def _safely(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.open.pop(name, None)
            why = _install(name) if isinstance(error, ImportError) else repr(error)
            print(f"tracker {name} failed, going on without it: {why}", file=sys.stderr)


def missing_packages(names: Sequence[str]) -> list[str]:
    """What to say about each tracker whose package isn't there, before anything is started."""
    return [
        _install(name)
        for name in names
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None
    ]


class CsvTracker:
    """One row per call; a metric that comes later gets a column, and the file is written anew."""

    def __init__(self, path: Path, step: int = 0) -> None:
        self.path, self.columns = path, ["step"]
        rows: list[dict[str, str]] = []
        if step and path.exists():
            lines = path.read_text().splitlines(keepends=True)
            lines = [
                line for line in lines if line.endswith("\n")
            ]  # a killed run's last may be cut
            rows = [row for row in csv.DictReader(lines) if int(row["step"]) <= step]
            self.columns = list(rows[0]) if rows else self.columns
        self._rewrite(rows)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if new := [name for name in metrics if name not in self.columns]:
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self.columns += new
            self._rewrite(rows)
        with self.path.open("a", newline="") as file:  # closed, so that it is on disk at once
            csv.DictWriter(file, self.columns).writerow({"step": step, **metrics})

    def close(self) -> None:
        pass

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self.path)


class TensorBoardTracker:
    """``tensorboard --logdir`` the folder."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbTracker:
    """Online, or offline by W&B's own WANDB_MODE. A run that goes on is one run there too."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], step: int) -> None:
        self.run: Any = import_module("wandb").init(
            project=project,
            name=folder.name,
            id=_kept_id(folder / "wandb-id", step),
            resume="allow",
            dir=str(folder),
            config=_plain(config),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class TrackioTracker:
    """Local by default; ``trackio show`` opens it."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], step: int) -> None:
        name = f"{folder.name}-{_kept_id(folder / 'trackio-id', step)}"
        self.run: Any = import_module("trackio").init(
            project=project, name=name, resume="allow", config=_plain(config), embed=False
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


def _kept_id(path: Path, step: int) -> str:
    """Drawn by a run that starts and read by those that go on from it."""
    if step == 0 or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text().strip()


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(config), default=str))
    return plain


def _install(name: str) -> str:
    return f"{name} needs a package: pip install {PACKAGES.get(name, name)}"
