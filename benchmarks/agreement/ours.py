"""Export a model, and write down what our engine says: greedy continuations and the log-probability of every token.

python -m benchmarks.agreement.ours --scheme w8a8-int8 --folder /tmp/qarl-agreement
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from qarl.build import build
from qarl.export import export
from qarl.recipe import parse_recipe
from qarl.records import Sampling

RECIPE = {
    "prompts": {"type": "arithmetic", "minimum": 1, "maximum": 99, "system": "Explain every step in full sentences."},
    "rewards": [{"type": "answer"}],
    "prompts_per_step": 16,
    "quant": {"rules": {"lm_head": "none"}},  # as an export writes it
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--scheme", default="w8a8-int8")
    parser.add_argument("--tokens", type=int, default=64, help="of every continuation")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    if options.scheme == "none":
        export(options.model, "hf", options.folder / "model")
    else:
        export(options.model, "compressed-tensors", options.folder / "model", options.scheme)
    table = {"model": options.model, "scheme": options.scheme, **RECIPE}
    system = build(parse_recipe(table, "agreement"))
    cast = system.cast
    cast.engine.load(cast.learner.publish())
    prompts = cast.prompts.take(0, RECIPE["prompts_per_step"])
    groups = cast.engine.generate(prompts, 1, Sampling(0.0, options.tokens, ()), seed=(0,))
    rows = [
        {
            "prompt": list(group.prompt.token_ids),
            "tokens": group.completions[0].token_ids.tolist(),
            "logprobs": group.completions[0].engine_logprobs.tolist(),
        }
        for group in groups
    ]
    (options.folder / "ours.json").write_text(json.dumps(rows))
    print(f"{len(rows)} continuations of {options.tokens} tokens in {options.folder}")


if __name__ == "__main__":
    main()
