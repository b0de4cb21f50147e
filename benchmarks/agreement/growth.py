"""How a difference in the last bits grows: the same tokens scored with embeddings that are a little other; and, to
compare, in full precision.

python -m benchmarks.agreement.growth --schemes none w4a16 w8a8-int8 w4a8-int8
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement.ours import RECIPE
from qarl.build import build
from qarl.learner.learner import LocalLearner
from qarl.models.decoder import Decoder, one_sequence
from qarl.ops.head import logits
from qarl.recipe import parse_recipe
from qarl.records import Sampling

PERTURBATIONS = (1e-7, 1e-5, 1e-3)
"""Relative, of every embedding: the first is the last bit of fp32."""

Computed = tuple[Tensor, list[Tensor]]

LAYERS = (1, 2, 4, 8, 16, 0)
"""Whose outputs are compared; 0 is the last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--schemes", nargs="+", default=["none", "w4a16", "w8a8-int8", "w4a8-int8"])
    parser.add_argument("--sequences", type=int, default=8)
    options = parser.parse_args()
    print("| scheme | changed by | log-probabilities: mean | median | largest | k3 | layers 1, 2, 4, 8, 16, last |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for scheme in options.schemes:
        for line in lines(options.model, scheme, options.sequences):
            print(line, flush=True)


@torch.no_grad()
def lines(model: str, scheme: str, count: int) -> list[str]:
    """A row for every perturbation, and one for full precision instead of the scheme: how far log-probabilities of the
    tokens that our engine samples, and hidden states, move.
    """
    table: dict[str, Any] = {"model": model, "scheme": scheme, **RECIPE}
    cast = build(parse_recipe(table, "growth")).cast
    assert isinstance(cast.learner, LocalLearner)
    cast.engine.load(cast.learner.publish())
    prompts = cast.prompts.take(0, RECIPE["prompts_per_step"])[:count]
    groups = cast.engine.generate(prompts, 1, Sampling(1.0, 64, ()), (0,))
    pairs = [(torch.tensor(group.prompt.token_ids), group.completions[0].token_ids) for group in groups]
    decoder = cast.learner.decoder
    embeddings = decoder.model.embed_tokens.weight
    original, before = embeddings.clone(), [computed(decoder, *pair) for pair in pairs]
    rows = []
    for size in PERTURBATIONS:
        embeddings.copy_(original * (1 + size * torch.randn_like(original)))
        rows.append(f"| `{scheme}` | {size:.0e} | {apart(before, [computed(decoder, *pair) for pair in pairs])} |")
    embeddings.copy_(original)
    decoder.serve_masters()
    rows.append(f"| `{scheme}` | full precision | {apart(before, [computed(decoder, *pair) for pair in pairs])} |")
    return rows


def apart(before: Sequence[Computed], after: Sequence[Computed]) -> str:
    """The differences, for a table."""
    signed = torch.cat([b[0] - a[0] for a, b in zip(before, after, strict=True)]).double()
    difference, k3 = signed.abs(), (signed.exp() - signed - 1).mean()
    growth = [relative([a[1][layer - 1] for a in before], [b[1][layer - 1] for b in after]) for layer in LAYERS]
    figures = " | ".join(f"{value:.1e}" for value in (difference.mean(), difference.median(), difference.max(), k3))
    return f"{figures} | {', '.join(f'{one:.0e}' for one in growth)}"


def computed(decoder: Decoder, prompt: Tensor, completion: Tensor) -> Computed:
    """Log-probabilities of a completion's tokens [T], and every layer's outputs [tokens, D]."""
    ids = torch.cat([prompt, completion])
    positions, spans, rotation = torch.arange(len(ids)), one_sequence(len(ids)), decoder.rotation(len(ids))
    x_TD, outputs = decoder.embeddings(ids), []
    for layer in decoder.layers:
        x_TD = layer(x_TD, positions, rotation, spans)
        outputs.append(x_TD)
    predicted = logits(decoder.head(), x_TD[len(prompt) - 1 : -1]).log_softmax(-1)
    return predicted.gather(-1, completion[:, None])[:, 0], outputs


def relative(before: list[Tensor], after: list[Tensor]) -> float:
    """The difference's norm as a share of the whole's."""
    a, b = torch.cat(before), torch.cat(after)
    return float((a - b).norm() / a.norm())


if __name__ == "__main__":
    main()
