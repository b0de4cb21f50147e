"""Seconds a GRPO step takes in TRL on this machine's CPU: SmolLM2-135M-Instruct, one-digit sums, full precision.

Runs in an environment of its own (requirements.txt) and imports nothing of ours. Progress goes to stderr, one JSON
object to stdout. The setting is the one in which `qarl bench step` is measured: P prompts a step, G completions of a
prompt, the same chat prompts, the same longest completion, one optimizer step on the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import sys
import tempfile
import time

import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.peers import smollm2

LAST_NUMBER = re.compile(r"-?\d+")


def sums(count: int, seed: int) -> Dataset:
    """Chat prompts "What is a + b?" with one-digit operands, and their answers."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        messages = [
            {"role": "system", "content": "Answer with only the number."},
            {"role": "user", "content": f"What is {a} + {b}?"},
        ]
        rows.append({"prompt": messages, "answer": str(a + b)})
    return Dataset.from_list(rows)


def last_number_is_right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1.0 where the last number of the completion is the answer, else 0.0."""
    found = [LAST_NUMBER.findall(completion[-1]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


class StepClock(TrainerCallback):
    """The moments at which optimizer steps ended, the start of training first."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.moments.append(time.perf_counter())

    def on_step_end(self, *_: object, **__: object) -> None:
        self.moments.append(time.perf_counter())
        print(f"step {len(self.moments) - 1}: {self.moments[-1] - self.moments[-2]:.2f} s", file=sys.stderr)

    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self.moments, self.moments[1:], strict=False)]


def configure(options: argparse.Namespace, folder: str) -> trl.GRPOConfig:
    """TRL's defaults, but for what makes the setting equal, and for what only makes TRL slower here."""
    return trl.GRPOConfig(
        output_dir=folder,
        max_steps=options.warmup + options.steps,
        per_device_train_batch_size=options.prompts * options.group,
        gradient_accumulation_steps=1,
        num_generations=options.group,
        max_completion_length=options.new_tokens,
        temperature=1.0,
        learning_rate=1e-5,
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # there is memory enough; recomputing would only cost time
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="longest completion")
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those, not counted")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = read_options()
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = trl.GRPOTrainer(
            model=smollm2.model(),
            processing_class=smollm2.tokenizer(),
            reward_funcs=last_number_is_right,
            args=configure(options, folder),
            train_dataset=sums(1000, options.seed),
            callbacks=[clock],
        )
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry][options.warmup :]
    counted = clock.seconds()[options.warmup :]
    print(
        json.dumps(
            {
                "peer": f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
                "step_s": round(statistics.median(counted), 3),
                "step_s_all": [round(seconds, 3) for seconds in counted],
                "median_of": len(counted),
                "prompts": options.prompts,
                "group": options.group,
                "new_tokens": options.new_tokens,
                "completion_tokens_mean": round(statistics.mean(e["completions/mean_length"] for e in log), 1),
                "reward_mean": round(statistics.mean(e["reward"] for e in log), 3),
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
