"""How every system here is run: as a command that measures once, or kept alive and asked over a pipe.

A system's `run.py` says how it loads and how it completes prompts; `main` does the rest. Progress and whatever else
libraries print go to stderr; stdout has JSON alone, one object a line. With `--serve` the first line names the system,
once it is loaded; then every line of stdin, `{"batch": 8, "prompt_len": 64, "new_tokens": 64}`, is answered by one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Setting:
    """What is generated: `batch` prompts of `prompt_len` random tokens, `new_tokens` after each."""

    batch: int
    prompt_len: int
    new_tokens: int


class System(Protocol):
    """A loaded model that completes prompts; `name` says what it is, with versions and precision."""

    name: str

    def complete(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[list[int]]:
        """Exactly `new_tokens` tokens after every prompt; nothing is remembered from earlier calls."""
        ...


Load = Callable[[argparse.Namespace], System]


def main(description: str | None, load: Load, add_options: Callable[[argparse.ArgumentParser], None]) -> None:
    """The command line of a system."""
    options = read_options(description, add_options)
    answer = answers_only_on_stdout()
    system = load(options)
    if options.ask is not None:
        answer({"system": system.name, "question": options.ask, "answer": ask(system, options.ask, options.new_tokens)})
    elif options.serve:
        serve(system, answer)
    else:
        for batch in options.batches:
            setting = Setting(batch, options.prompt_len, options.new_tokens)
            measure(system, setting)  # warms up
            for _ in range(options.rounds):
                answer(measure(system, setting))


def read_options(description: str | None, add_options: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--batches", type=int, nargs="+", default=[32], help="how many prompts at once")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each batch, after one that warms up")
    parser.add_argument("--serve", action="store_true", help="answer requests from stdin until it ends")
    parser.add_argument("--ask", metavar="TEXT", help="answer this question, greedily, in place of measuring")
    add_options(parser)
    return parser.parse_args()


def answers_only_on_stdout() -> Callable[[dict[str, Any]], None]:
    """A function that writes a JSON line to stdout; all else that is written there goes to stderr from now on."""
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=stdout)


def serve(system: System, answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests until stdin ends; the first generation of each setting warms up and is not counted."""
    warm: set[Setting] = set()
    answer({"system": system.name})
    for line in sys.stdin:
        setting = Setting(**json.loads(line))
        if setting not in warm:
            measure(system, setting)
            warm.add(setting)
        answer(measure(system, setting))


def measure(system: System, setting: Setting) -> dict[str, Any]:
    """Seconds of one whole generation, prefill included."""
    from benchmarks.peers.smollm2 import random_prompts

    prompts = random_prompts(setting.batch, setting.prompt_len)
    started = time.perf_counter()
    completions = system.complete(prompts, setting.new_tokens, temperature=1.0)
    seconds = time.perf_counter() - started
    lengths = [len(completion) for completion in completions]
    if lengths != [setting.new_tokens] * setting.batch:
        sys.exit(f"{system.name}: completions of {lengths} tokens, wanted {setting.batch} of {setting.new_tokens}")
    rate = setting.batch * setting.new_tokens / seconds
    print(f"{system.name}: batch {setting.batch}, {seconds:.3f} s, {rate:.0f} tokens/s", file=sys.stderr)
    return {"system": system.name, **asdict(setting), "seconds": seconds, "tokens_per_s": rate}


def ask(system: System, question: str, new_tokens: int) -> str:
    """The greedy answer to a chat question: sensible text, if the system computes what it should."""
    from benchmarks.peers.smollm2 import tokenizer

    speaker = tokenizer()
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    [completion] = system.complete([speaker.encode(text)], new_tokens, temperature=0.0)
    return str(speaker.decode(completion))
