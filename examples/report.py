"""``report.md`` of a run: its curves with captions, what it was, how long it took, what it writes."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Records = Sequence[Mapping[str, float]]
GIB = 2**30
BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d95f02", "#2a8c62", "0.45"
AGAINST = "million tokens seen"


def write_report(
    folder: Path,
    records: Records,
    *,
    title: str,
    baselines: Mapping[str, float] | None = None,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    sample: tuple[str, str] | None = None,
) -> Path:
    """Writes ``report.md`` and its pictures into ``folder``; without matplotlib the text alone.

    Args:
        folder: Where it goes; pictures of an earlier report are replaced.
        records: The lines of ``metrics.jsonl``, see `RunLog`.
        title: Its heading.
        baselines: Losses to compare with, in nats per token.
        facts: Heading -> table of names and values: configuration, precision, timings.
        sample: A prompt and the text that the model made of it, prompt included.

    Returns:
        The path of ``report.md``.
    """
    baselines = dict(baselines or {})
    parts = [f"# {title}", _summary(records)]
    folder.mkdir(parents=True, exist_ok=True)
    pictures = (
        (plot_losses, "loss.png", _loss_caption(records, baselines)),
        (
            _plot_gradients,
            "gradients.png",
            "Norms of gradients and parameters, of the whole model.",
        ),
        (_plot_speed, "speed.png", "Training speed, and where the time of a step goes."),
        (_plot_schedule, "schedule.png", "Learning rate, and memory of the rank that writes."),
    )
    try:
        for draw, name, caption in pictures:
            draw(folder / name, records, baselines)
            parts.append(f"![{Path(name).stem}]({name})\n\n*{caption}*")
    except ImportError:
        print("no pictures in report.md: pip install matplotlib", file=sys.stderr)
    valid = _last(records, "valid/loss")
    if baselines or valid is not None:
        rows = dict(baselines) | ({"this model": valid} if valid is not None else {})
        table = [(name, f"{nats:.3f}", f"{_exp(nats)}") for name, nats in rows.items()]
        parts.append("## Validation loss\n\n" + _table(("", "nats per token", "perplexity"), table))
    if sample:
        prompt, text = sample
        more = text.removeprefix(prompt)
        quoted = f"**{prompt}**{more}" if more != text else text
        lines = "\n".join(f"> {line}" for line in quoted.splitlines())
        parts.append(f"## A sample\n\nThe prompt is bold; the rest is the model's.\n\n{lines}")
    for heading, values in (facts or {}).items():
        cells = [(f"`{name}`", _cell(value)) for name, value in values.items()]
        parts.append(f"## {heading}\n\n" + _table(("", ""), cells))
    path = folder / "report.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def plot_losses(path: Path, records: Records, baselines: Mapping[str, float]) -> None:
    """Training and validation loss over tokens, with a line for each baseline."""
    figure, (axes,) = _figure(1, "loss (nats per token)")
    tokens, losses = _series(records, "train/loss")
    axes.plot(tokens, losses, color=BLUE, linewidth=1.2, label="training", alpha=0.8)
    tokens, valid = _series(records, "valid/loss")
    if tokens:
        label = f"validation (last {valid[-1]:.2f})"
        axes.plot(tokens, valid, color=ORANGE, marker="o", markersize=4, label=label)
    for style, (name, nats) in zip((":", "--", "-.", "-"), baselines.items()):
        axes.axhline(nats, color=GREY, linestyle=style, linewidth=1, label=f"{name} ({nats:.2f})")
    _resumes(axes, records)
    _legend(axes)
    figure.savefig(path, dpi=120)


def _plot_gradients(path: Path, records: Records, _: Mapping[str, float]) -> None:
    figure, (above, below) = _figure(2, "gradient norm,\nbefore clipping", "parameter norm")
    above.plot(*_series(records, "grad/norm_preclip"), color=BLUE, linewidth=1.2)
    above.set_yscale("log")
    _plain_ticks(above)
    below.plot(*_series(records, "param/norm"), color=GREEN, linewidth=1.2)
    for axes in (above, below):
        _resumes(axes, records)
    figure.savefig(path, dpi=120)


def _plot_speed(path: Path, records: Records, _: Mapping[str, float]) -> None:
    figure, (above, below) = _figure(2, "tokens/s, all devices", "seconds per step")
    tokens, speed = _series(records, "train/tps")
    above.plot(tokens, speed, color=BLUE, linewidth=1.2)
    above.set_ylim(bottom=0)
    above.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    parts = {"dt": "whole", "dtf": "forward", "dtb": "backward", "dtd": "waiting for data"}
    for (key, label), color in zip(parts.items(), ("0.2", BLUE, ORANGE, GREEN)):
        tokens, seconds = _series(records, f"train/{key}")
        if tokens:
            below.plot(tokens, seconds, color=color, linewidth=1.2, label=label)
    typical = sorted(_series(records, "train/dt")[1])
    # The first step may compile for a minute, and would leave the others a line at the bottom.
    below.set_ylim(0, 2.0 * typical[int(0.9 * (len(typical) - 1))] if typical else None)
    _legend(below, ncols=4, loc="upper right")
    for axes in (above, below):
        _resumes(axes, records)
    figure.savefig(path, dpi=120)


def _plot_schedule(path: Path, records: Records, _: Mapping[str, float]) -> None:
    figure, (above, below) = _figure(2, "learning rate", "memory (GiB)")
    above.plot(*_series(records, "opt/lr"), color=BLUE, linewidth=1.2)
    above.set_ylim(bottom=0)
    above.ticklabel_format(axis="y", scilimits=(-2, 2))
    for key, label, style in (("mem_alloc", "now", "-"), ("mem_peak_alloc", "peak", "--")):
        tokens, used = _series(records, f"train/{key}")
        below.plot(tokens, [x / GIB for x in used], style, color=GREEN, linewidth=1.2, label=label)
    below.set_ylim(bottom=0)
    _legend(below, loc="lower right")
    for axes in (above, below):
        _resumes(axes, records)
    figure.savefig(path, dpi=120)


def _figure(panels: int, *labels: str) -> tuple[Any, list[Any]]:
    """Panels above each other over one axis of tokens; no global state of pyplot's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4 if panels == 1 else 5), layout="constrained")
    axes = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
    for one, label in zip(axes, labels, strict=True):
        one.set_ylabel(label)
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="0.9", linewidth=0.8)
        one.margins(x=0.01)
    axes[-1].set_xlabel(AGAINST)
    return figure, axes


def _series(records: Records, key: str) -> tuple[list[float], list[float]]:
    points = [(r["train/tokens_seen"] / 1e6, r[key]) for r in records if key in r]
    return [x for x, _ in points], [y for _, y in points]


def _resumes(axes: Any, records: Records) -> None:
    for i, tokens in enumerate(_series(records, "train/resumed_from")[0]):
        label = "went on from a checkpoint" if i == 0 else None
        axes.axvline(tokens, color="0.7", linewidth=1, linestyle=(0, (1, 2)), label=label)


def _legend(axes: Any, **options: Any) -> None:
    if axes.get_legend_handles_labels()[0]:  # none: matplotlib would warn
        axes.legend(frameon=False, **options)


def _plain_ticks(axes: Any) -> None:
    """0.5, 1, 2 rather than powers of ten, of which a norm may cross none."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _summary(records: Records) -> str:
    steps = [r for r in records if "train/iter" in r]
    if not steps:
        return "No step was logged."
    last = steps[-1]
    speeds = sorted(r["train/tps"] for r in steps if "train/tps" in r)
    lines = [
        f"- {last['train/iter']:,.0f} steps, {last['train/tokens_seen']:,.0f} tokens",
        f"- training loss {steps[0]['train/loss']:.3f} at step {steps[0]['train/iter']:.0f},"
        f" {last['train/loss']:.3f} at the last",
    ]
    if speeds:
        lines.append(f"- median speed {speeds[len(speeds) // 2]:,.0f} tokens/s")
    if (mfu := _last(records, "train/mfu")) is not None:
        lines.append(f"- model FLOPs utilisation {mfu:.1%} at the last step")
    if skipped := _last(records, "opt/skipped"):
        lines.append(f"- {skipped:.0f} steps skipped, as their gradients weren't finite")
    restarts = [r["train/restart_seconds"] for r in records if "train/restart_seconds" in r]
    for i, r in enumerate([r for r in records if "train/resumed_from" in r]):
        took = f", {restarts[i]:.1f} s after the restart" if i < len(restarts) else ""
        lines.append(f"- went on from the checkpoint of step {r['train/resumed_from']:.0f}{took}")
    return "\n".join(lines)


def _loss_caption(records: Records, baselines: Mapping[str, float]) -> str:
    caption = "Loss over tokens seen"
    if _last(records, "valid/loss") is not None:
        caption += ", on training batches and on held-out text"
    if baselines:
        caption += f"; horizontal lines: what {' and '.join(baselines)} counts reach on the latter"
    return caption + "."


def _last(records: Records, key: str) -> float | None:
    return next((r[key] for r in reversed(records) if key in r), None)


def _exp(nats: float) -> str:
    return f"{math.exp(nats):,.1f}" if nats < 50 else "-"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
