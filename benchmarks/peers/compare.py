"""Rollout speed of qarl next to its peers on one machine, measured in turns so that noise falls on all alike.

    python -m benchmarks.peers.compare qarl=PYTHON vllm=PYTHON openvino=PYTHON --output rollout.jsonl

Every argument names systems (each in `SYSTEMS` that is called so or begins so: `vllm` is `vllm-fp32`, `vllm-int8`, ...)
and the interpreter of the environment they run in. In every round each system has one turn a setting; between its
turns it is stopped with SIGSTOP, for some libraries' threads spin while they wait. Every measurement is a line of
`--output`; stdout gets a table of medians.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]

SYSTEMS: dict[str, tuple[str, ...]] = {
    "qarl-none": ("qarl_native", "--scheme", "none"),
    "qarl-w8a8-int8": ("qarl_native", "--scheme", "w8a8-int8"),
    "qarl-w8a8-int8-kv8": ("qarl_native", "--scheme", "w8a8-int8", "--kv-cache", "int8"),
    "qarl-w4a8-int8": ("qarl_native", "--scheme", "w4a8-int8"),
    "qarl-w4a8-int8-kv8": ("qarl_native", "--scheme", "w4a8-int8", "--kv-cache", "int8"),
    "qarl-w4a16": ("qarl_native", "--scheme", "w4a16-g64"),
    "vllm-fp32": ("vllm_cpu", "--precision", "fp32", "--search-bind"),
    "vllm-int8": ("vllm_cpu", "--precision", "int8", "--search-bind"),
    "vllm-bf16": ("vllm_cpu", "--precision", "bf16", "--search-bind"),
    "vllm-int8-bf16": ("vllm_cpu", "--precision", "int8-bf16", "--search-bind"),
    "openvino-int8": ("openvino_genai",),
    "llama-q4_0": ("llama_cpp", "--weights", "Q4_0"),
    "llama-q4_1": ("llama_cpp", "--weights", "Q4_1"),
    "llama-q8_0": ("llama_cpp", "--weights", "Q8_0"),
    "transformers-fp32": ("transformers_generate",),
}
"""A name, and the folder here with its `run.py`, with the options that make it this system."""

OURS = "qarl"

Rates = Mapping[tuple[str, int], list[float]]
"""Tokens a second by system and batch, one of each round."""


class Served:
    """A system in a process group of its own, stopped unless it is asked."""

    def __init__(self, name: str, python: str) -> None:
        folder, *options = SYSTEMS[name]
        command = [python, "-m", f"benchmarks.peers.{folder}.run", "--serve", *options]
        self.name = name
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.version = "not loaded"

    def load(self) -> None:
        say(f"{self.name}: loading")
        self.version = self._answer()["system"]
        self._signal(signal.SIGSTOP)

    def measure(self, request: dict[str, int]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: what it said stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)


@contextlib.contextmanager
def all_served(pythons: Mapping[str, str]) -> Iterator[list[Served]]:
    """Every system loaded, one after another; none outlives the block."""
    with contextlib.ExitStack() as stack:
        served = []
        for name, python in pythons.items():
            served.append(Served(name, python))
            stack.callback(served[-1].close)
            served[-1].load()
        yield served


def compare(served: Sequence[Served], options: argparse.Namespace, output: IO[str]) -> Rates:
    """All rounds; each measurement is written as soon as it is there."""
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    for index, batch, turn in itertools.product(range(options.rounds), options.batches, range(len(served))):
        system = served[(turn + index) % len(served)]  # in every round another one begins
        request = {"batch": batch, "prompt_len": options.prompt_len, "new_tokens": options.new_tokens}
        answer = system.measure(request)
        rates[system.name, batch].append(answer["tokens_per_s"])
        print(json.dumps({"name": system.name, "round": index, **answer}), file=output, flush=True)
    return rates


def table(rates: Rates, names: Sequence[str], batches: Sequence[int]) -> str:
    """Medians as Markdown, a row a system; last, how many times as fast each of ours is as the best peer."""
    median = {key: statistics.median(values) for key, values in rates.items()}
    rows = [["tokens/s", *(f"batch {batch}" for batch in batches)], ["---", *("---:" for _ in batches)]]
    rows += [[name, *(f"{median[name, batch]:.0f}" for batch in batches)] for name in names]
    ours = [name for name in names if name.startswith(OURS)]
    peers = [name for name in names if not name.startswith(OURS)]
    if ours and peers:
        for name in ours:
            ratios = [median[name, batch] / max(median[peer, batch] for peer in peers) for batch in batches]
            rows.append([f"{name} / best peer", *(f"{ratio:.2f}" for ratio in ratios)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def environments(arguments: Sequence[str]) -> dict[str, str]:
    """The interpreter of every system that was named."""
    pythons: dict[str, str] = {}
    for argument in arguments:
        prefix, _, python = argument.partition("=")
        names = [name for name in SYSTEMS if name == prefix or name.startswith(f"{prefix}-")]
        if not names or not python:
            sys.exit(f"{argument!r} is not NAME=PYTHON with NAME one of {', '.join(SYSTEMS)} or a beginning of one")
        pythons |= dict.fromkeys(names, python)
    return pythons


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="+", metavar="NAME=PYTHON", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("peers.jsonl"), help="every measurement, a line each")
    return parser.parse_args()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = read_options()
    pythons = environments(options.environments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the systems are ended too
    with open(options.output, "w") as output, all_served(pythons) as served:
        rates = compare(served, options, output)
        versions = [f"- {system.name}: {system.version}" for system in served]
    print(table(rates, list(pythons), options.batches), "", *versions, sep="\n")


if __name__ == "__main__":
    main()
