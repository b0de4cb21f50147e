"""Draw kept results of comparisons into one picture for these pages: a panel a comparison, a colour an arm.

python docs/draw_results.py --out docs/img/arms.png experiments/results/addition.json experiments/results/sorting.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(axes: Axes, results: dict[str, Any], metric: str) -> None:
    """The mean over an arm's runs as a line, from the lowest to the highest as a band; of `window` steps each."""
    window = results["settings"]["window"]
    for index, (name, arm) in enumerate(results["arms"].items()):
        curves = [run["curves"][metric] for run in results["runs"] if run["arm"] == name and run["state"] == "finished"]
        if not curves:
            continue
        smooth = np.stack([np.convolve(curve, np.full(window, 1 / window), "valid") for curve in curves])
        steps = np.arange(window, window + smooth.shape[1])
        axes.plot(steps, smooth.mean(0), f"C{index}", label=f"{arm['title']} ({len(curves)})")
        axes.fill_between(steps, smooth.min(0), smooth.max(0), color=f"C{index}", alpha=0.15, linewidth=0)
    axes.set(xlabel="steps", ylabel=f"{metric}, mean of {window} steps", title=results["name"])
    axes.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--metric", default="reward/mean")
    given = parser.parse_args()
    figure = Figure(figsize=(5 * len(given.results), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(given.results), squeeze=False)[0]
    for axes, path in zip(panels, given.results, strict=True):
        draw(axes, json.loads(path.read_text(encoding="utf-8")), given.metric)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, title="arm (runs)")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out, dpi=90)


if __name__ == "__main__":
    main()
