"""How well a sign of error tokens finds the tokens that should not have been drawn.

    python -m experiments.error_tokens bed addition runs/addition/unaligned/seed-0 --steps 0 \\
        --learner runs/beds/addition
    python -m experiments.error_tokens labelled experiments/smollm2/labelled.jsonl --unquantized runs/prose/none

On the test beds the truth is known: there is one right way to write the work. Of every completion the tokens up to the
first wrong one are judged, and none after it: they follow from it.

Prose has no right way, so `labelled.jsonl` was labelled by reading: completions of SmolLM2-135M at temperature 1 with
weights of 4 bits (all but one of 24) and of 3 bits (the first 8). One reader, a language model, saw the text alone,
token by token, before any probability. `e`: an error, a token that breaks a text which made sense so far or is
absurd in its place (a garbled word, a non-sequitur, a number copied wrongly); `f`: fine, and so are wrong facts; `a`:
after an error, in garbage or a loop, where nobody can say. One completion whose probabilities had been seen is absent.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.tasks import TASKS, first_wrong
from experiments.warmup import tokenizer
from qarl.runfolder import RunFolder
from qarl.tracking.completions import Written, read_completions, step_files

ERROR, FINE, AFTER = "efa"

RUN_REACH = 4
"""In a run, an improbable token has another no further away than this."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A completion's log-probabilities and labels (ERROR, FINE, AFTER); `learner` is empty if not asked for."""

    engine: Sequence[float]
    learner: Sequence[float]
    labels: str

    def indices(self, label: str) -> list[int]:
        return [index for index, one in enumerate(self.labels) if one == label]


Sign = Callable[[Judged, int], bool]


def signs(has_learner: bool) -> dict[str, Sign]:
    """What may mark a token, by what it is called in the table."""
    found: dict[str, Sign] = {f"engine < 1e-{power}": _below("engine", power) for power in range(1, 6)}
    found |= {f"engine < 1e-{power}, in a run": _in_run(power) for power in (2, 3, 4)}
    if has_learner:
        found |= {f"learner < 1e-{power}": _below("learner", power) for power in range(1, 6)}
        found |= {f"learner < engine / {factor}": _ratio(factor) for factor in (3, 10, 100)}
        found["learner or engine < 1e-2"] = lambda judged, index: (
            _below("engine", 2)(judged, index) or _below("learner", 2)(judged, index)
        )
        found["learner < 1e-4 and < engine / 3"] = lambda judged, index: (
            _below("learner", 4)(judged, index) and _ratio(3)(judged, index)
        )
    return found


def _below(who: str, power: int) -> Sign:
    limit = -power * math.log(10)
    return lambda judged, index: getattr(judged, who)[index] < limit


def _in_run(power: int) -> Sign:
    below = _below("engine", power)

    def sign(judged: Judged, index: int) -> bool:
        near = range(max(index - RUN_REACH, 0), min(index + RUN_REACH + 1, len(judged.engine)))
        return below(judged, index) and any(below(judged, other) for other in near if other != index)

    return sign


def _ratio(factor: float) -> Sign:
    return lambda judged, index: judged.learner[index] < judged.engine[index] - math.log(factor)


def marks(judged: Sequence[Judged], sign: Sign, label: str) -> tuple[int, int]:
    """How many of the tokens with a label a sign marks, and how many there are."""
    marked = [sign(one, index) for one in judged for index in one.indices(label)]
    return sum(marked), len(marked)


def scores(judged: Sequence[Judged], sign: Sign) -> dict[str, float]:
    """Of a sign: recall (errors that it marks), precision (of the marked tokens that are an error or fine, those that
    are an error), marks in 1000 fine tokens, and in 1000 tokens of any label. NaN where there are none of them.
    """
    (found, errors), (false, fine), (after, rest) = (marks(judged, sign, label) for label in (ERROR, FINE, AFTER))
    return {
        "recall": _share(found, errors),
        "precision": _share(found, found + false),
        "false marks per 1000": 1000 * _share(false, fine),
        "marks per 1000": 1000 * _share(found + false + after, errors + fine + rest),
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


@torch.no_grad()
def learner_logprobs(model: LlamaForCausalLM, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """What the full-precision model gives each token."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    logprobs: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return logprobs


def judge(task: str, written: Written, encode: PreTrainedTokenizerFast, model: LlamaForCausalLM | None) -> Judged:
    """A completion of a bed: all that comes after the first wrong token follows from it."""
    tokens = written.token_ids
    wrong = first_wrong(TASKS[task].work(written.prompt), written.completion, written.finish_reason == "stop")
    return Judged(
        engine=written.engine_logprobs,
        learner=[] if model is None else learner_logprobs(model, encode(written.prompt).input_ids, tokens),
        labels=FINE * len(tokens) if wrong is None else f"{FINE * wrong}{ERROR}{AFTER * (len(tokens) - wrong - 1)}",
    )


def read_labelled(path: Path) -> list[Judged]:
    """The completions of a file labelled by hand."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Judged(row["engine_logprobs"], row["learner_logprobs"], row["labels"]) for row in rows]


def unlabelled(written: Sequence[Written]) -> list[Judged]:
    """Completions without quantization: what samples them is what would judge them, and no token is an error."""
    return [Judged(one.engine_logprobs, one.engine_logprobs, FINE * len(one.token_ids)) for one in written]


def table(judged: Sequence[Judged], has_learner: bool, unquantized: Sequence[Judged] = ()) -> str:
    """Markdown: one line a sign; with completions without quantization, also the marks in 1000 of their tokens."""
    rows = {name: scores(judged, sign) for name, sign in signs(has_learner).items()}
    if unquantized:
        for name, sign in signs(has_learner).items():
            rows[name]["unquantized, marks per 1000"] = scores(unquantized, sign)["marks per 1000"]
    heads = list(next(iter(rows.values())))
    lines = [f"| sign | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{row[head]:.3g}' for head in heads)} |" for name, row in rows.items()]
    return "\n".join(lines)


def _written(run: Path, steps: Sequence[int]) -> Iterator[Written]:
    files = step_files(RunFolder(run).completions)
    for step in steps:
        yield from read_completions(files[step])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    truths = parser.add_subparsers(dest="truth", required=True)
    bed = truths.add_parser("bed", help="completions of a test bed")
    bed.add_argument("task", choices=TASKS)
    bed.add_argument("run", type=Path)
    bed.add_argument("--steps", type=int, nargs="+", required=True, help="which steps' completions to judge")
    bed.add_argument("--learner", type=Path, help="a model folder: what full precision thinks of the tokens")
    labelled = truths.add_parser("labelled", help="completions labelled by hand")
    labelled.add_argument("file", type=Path)
    labelled.add_argument(
        "--unquantized", type=Path, help="a run of the same questions with scheme none: its first step"
    )
    given = parser.parse_args()
    if given.truth == "bed":
        model = None if given.learner is None else LlamaForCausalLM.from_pretrained(given.learner, dtype=torch.float32)
        encode = tokenizer()
        judged = [judge(given.task, one, encode, model) for one in _written(given.run, given.steps)]
        unquantized, has_learner = [], model is not None
    else:
        judged, has_learner = read_labelled(given.file), True
        unquantized = [] if given.unquantized is None else unlabelled(list(_written(given.unquantized, [0])))
    labels = "".join(one.labels for one in judged)
    print(f"{len(judged)} completions; {labels.count(ERROR)} tokens are errors, {labels.count(FINE)} are fine\n")
    print(table(judged, has_learner, unquantized))


if __name__ == "__main__":
    main()
