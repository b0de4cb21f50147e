"""Draw kept results of comparisons into one picture for these pages: a panel a comparison, a colour an arm.

python docs/draw_results.py --out docs/img/arms.png experiments/results/addition.json experiments/results/sorting.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qarl.compare.page import arm_curves
from qarl.compare.results import Results


def draw(axes: Axes, results: Results, metric: str) -> None:
    """An arm's mean and band as `qarl compare` has them on its page."""
    for index, (name, arm) in enumerate(results.arms.items()):
        if not results.runs_of(name):
            continue
        mean = arm_curves(results, name, metric)[-1]
        axes.plot(mean.x, mean.y, f"C{index}", label=f"{arm.title} ({len(results.runs_of(name))})")
        if mean.low is not None and mean.high is not None:
            axes.fill_between(mean.x, mean.low, mean.high, color=f"C{index}", alpha=0.15, linewidth=0)
    axes.set(xlabel="steps", ylabel=f"{metric}, mean of {results.settings['window']} steps", title=results.name)
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
        draw(axes, Results.model_validate_json(path.read_text(encoding="utf-8")), given.metric)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, title="arm (runs)")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out, dpi=90)


if __name__ == "__main__":
    main()
