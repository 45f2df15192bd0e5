"""What a scenario found, written as JSON, as a Markdown table and as a plot."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Cell = str | float | int


@dataclass(frozen=True, slots=True)
class Check:
    """A relation between figures of one run, which a slow machine does not change."""

    sentence: str
    held: bool


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over x, or bars where `names` are given for the x of each."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    names: Sequence[str] = ()
    log_y: bool = False


@dataclass(slots=True)
class Report:
    """One scenario's outcome. `rows` are the table; `summary` is one sentence with its figures."""

    name: str
    title: str
    rows: list[dict[str, Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    summary: str = ""
    speed_ms: list[float] = field(default_factory=list)

    def check(self, sentence: str, held: bool) -> None:
        """Add a relation."""
        self.checks.append(Check(sentence, held))

    def as_markdown(self, about: Mapping[str, Any]) -> str:
        """The table, with what was run on what."""
        lines = [f"# {self.title}", ""]
        if self.rows:
            columns = list(self.rows[0])
            lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
            lines += [f"| {' | '.join(_cell(row.get(column, '')) for column in columns)} |" for row in self.rows]
            lines.append("")
        lines += [f"* {note}" for note in self.notes]
        lines += [f"* {'held' if check.held else '**not held**'}: {check.sentence}" for check in self.checks]
        lines += ["", f"{_sentence(about)} A fixed loop of Python took {_speed(self.speed_ms)} around it.", ""]
        return "\n".join(lines)

    def write(self, folder: Path, about: Mapping[str, Any]) -> None:
        """`<name>.json`, `<name>.md` and `<name>.png`."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {**asdict(self), "about": about}
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / f"{self.name}.md").write_text(self.as_markdown(about))
        if self.plots:
            _draw(self.plots, folder / f"{self.name}.png")


def _sentence(about: Mapping[str, Any]) -> str:
    at = dt.datetime.fromisoformat(about["at"])
    return (
        f"Measured {at:%Y-%m-%d} at commit `{about['commit']}` on {about['cpus']} x {about['cpu']}, "
        f"Linux {about['kernel']}, Python {about['python']}, PostgreSQL {about['postgres']}, Valkey {about['valkey']}."
    )


def _speed(speed_ms: Sequence[float]) -> str:
    return " and ".join(f"{each:.0f} ms" for each in speed_ms) or "an unknown time"


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return value
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _draw(plots: Sequence[Plot], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - half a second, and only for a whole run

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, len(plots), figsize=(6.4 * len(plots), 4.2), squeeze=False, layout="constrained")
    for axis, plot in zip(axes[0], plots, strict=True):
        axis.set_title(plot.title)
        axis.set_xlabel(plot.x_label)
        axis.set_ylabel(plot.y_label)
        width = 0.8 / max(1, len(plot.series))
        for number, (label, points) in enumerate(plot.series.items()):
            xs, ys = [x for x, _ in points], [y for _, y in points]
            if plot.names:
                axis.bar([x + number * width for x in xs], ys, width, label=label)
            else:
                axis.plot(xs, ys, label=label, marker="o" if len(xs) < 12 else None, markersize=4)
        if plot.names:
            middle = (len(plot.series) - 1) * width / 2
            axis.set_xticks([number + middle for number in range(len(plot.names))], plot.names)
        if plot.log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(visible=True, axis="y", alpha=0.3)
        if len(plot.series) > 1:
            axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
