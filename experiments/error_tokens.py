"""How well a sign of error tokens finds the token in which a completion leaves the right work.

    python -m experiments.error_tokens addition runs/addition/unaligned/seed-0 --steps 0 --learner runs/beds/addition

On the test beds the truth is known: there is one right way to write the work. Of every completion the tokens up to the
first wrong one are judged, and none after it: they follow from it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from experiments.tasks import TASKS, first_wrong
from experiments.warmup import tokenizer
from qarl.runfolder import RunFolder
from qarl.tracking.completions import Written, read_completions, step_files


@dataclass(frozen=True, slots=True)
class Judged:
    """A completion's tokens up to the first wrong one, whose index is `wrong`; `learner` is empty if not asked for."""

    engine: Sequence[float]
    learner: Sequence[float]
    wrong: int | None

    @property
    def length(self) -> int:
        return len(self.engine) if self.wrong is None else self.wrong + 1


Sign = Callable[[Judged, int], bool]


def signs(has_learner: bool) -> dict[str, Sign]:
    """What may mark a token, by what it is called in the table."""
    found: dict[str, Sign] = {}
    for power in range(1, 6):
        found[f"engine < 1e-{power}"] = _below("engine", -power)
    if has_learner:
        for power in range(1, 6):
            found[f"learner < 1e-{power}"] = _below("learner", -power)
        for factor in (3, 10, 100):
            found[f"learner < engine / {factor}"] = _ratio(factor)
        found["learner or engine < 1e-2"] = lambda judged, index: (
            _below("engine", -2)(judged, index) or _below("learner", -2)(judged, index)
        )
    return found


def _below(who: str, power: int) -> Sign:
    limit = power * math.log(10)
    return lambda judged, index: getattr(judged, who)[index] < limit


def _ratio(factor: float) -> Sign:
    return lambda judged, index: judged.learner[index] < judged.engine[index] - math.log(factor)


def scores(judged: Sequence[Judged], sign: Sign) -> dict[str, float]:
    """Of a sign: recall (wrong tokens that it marks), precision (marked tokens that are wrong), marks in 1000 tokens
    that are right, and the share of all tokens judged that it marks.
    """
    wrong = [one for one in judged if one.wrong is not None]
    found = sum(sign(one, one.wrong) for one in wrong if one.wrong is not None)
    false = sum(sign(one, index) for one in judged for index in range(one.length) if index != one.wrong)
    tokens = sum(one.length for one in judged)
    return {
        "recall": found / len(wrong) if wrong else math.nan,
        "precision": found / (found + false) if found + false else math.nan,
        "false marks per 1000": 1000 * false / (tokens - len(wrong)),
        "share marked": (found + false) / tokens,
    }


@torch.no_grad()
def learner_logprobs(model: LlamaForCausalLM, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """What the full-precision model gives each token."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    found: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return found


def judge(task: str, written: Written, model: LlamaForCausalLM | None) -> Judged:
    prompt = tokenizer()(written.prompt).input_ids
    tokens = list(written.token_ids)
    return Judged(
        engine=written.engine_logprobs,
        learner=[] if model is None else learner_logprobs(model, prompt, tokens),
        wrong=first_wrong(TASKS[task].work(written.prompt), written.completion, written.finish_reason == "stop"),
    )


def table(judged: Sequence[Judged], has_learner: bool) -> str:
    """Markdown: one line a sign."""
    rows = {name: scores(judged, sign) for name, sign in signs(has_learner).items()}
    heads = list(next(iter(rows.values())))
    lines = [f"| sign | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{row[head]:.3g}' for head in heads)} |" for name, row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", required=True, help="which steps' completions to judge")
    parser.add_argument("--learner", type=Path, help="a model folder: what full precision thinks of the tokens")
    given = parser.parse_args()
    model = None if given.learner is None else LlamaForCausalLM.from_pretrained(given.learner, dtype=torch.float32)
    files = step_files(RunFolder(given.run).completions)
    written = [one for step in given.steps for one in read_completions(files[step])[0]]
    judged = [judge(given.task, one, model) for one in written]
    wrong = sum(one.wrong is not None for one in judged)
    print(f"{len(judged)} completions, {wrong} wrong; {sum(one.length for one in judged)} tokens judged\n")
    print(table(judged, model is not None))


if __name__ == "__main__":
    main()
