"""Seconds to publish to a running vLLM, and their parts; the last line is the median.

python -m benchmarks.agreement.publish recipes/vllm.toml
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from qarl.build import build
from qarl.recipe import load_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options, overrides = parser.parse_known_args()
    cast = build(load_recipe(options.recipe, overrides)).cast
    cast.engine.load(cast.learner.publish())  # starts vLLM
    seconds = []
    for _ in range(options.rounds):
        started = time.perf_counter()
        cast.engine.load(cast.learner.publish())
        seconds.append(time.perf_counter() - started)
        print(json.dumps({name: metric.value() for name, metric in cast.engine.metrics().items()}), flush=True)
    print(json.dumps({"seconds": statistics.median(seconds), "rounds": options.rounds}))


if __name__ == "__main__":
    main()
