"""Draw the training reward and held-out accuracy of several runs into one picture for these pages.

python docs/draw_runs.py --out docs/img/quickstart.png --title "one-digit sums" runs/seed-0 runs/seed-1 runs/seed-2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qarl.tracking.jsonl import EVALUATIONS_FILE, METRICS_FILE, read_lines


def draw(runs: list[Path], title: str, out: Path, reward: str, accuracy: str) -> None:
    """One colour a run: its reward as a line, its held-out accuracy as dots."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, run in enumerate(runs):
        steps, held_out = read_lines(run / METRICS_FILE), read_lines(run / EVALUATIONS_FILE)
        colour = f"C{index}"
        axes.plot(
            [r["step"] + 1 for r in steps], [r[reward] for r in steps], colour, alpha=0.6, label=f"{run.name}: {reward}"
        )
        axes.plot([r["step"] for r in held_out], [r[accuracy] for r in held_out], colour, marker="o", linestyle="none")
    axes.set(xlabel="steps", ylabel="share right", ylim=(-0.03, 1.03), title=f"{title} (dots: held-out, 200 questions)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", required=True)
    parser.add_argument("--reward", default="reward/mean")
    parser.add_argument("--accuracy", default="eval/held_out/pass@1")
    given = parser.parse_args()
    draw(given.runs, given.title, given.out, given.reward, given.accuracy)


if __name__ == "__main__":
    main()
