"""Tokens a second of llama.cpp, one sequence a prompt, all in one batch; Q4_1 as the file is, or requantized.

Tokens are chosen greedily: its samplers sort the vocabulary row by row, which a comparison should not hold against it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.protocol import System, main

BATCH_TOKENS = 2048
"""Most tokens in one call of `llama_decode`."""

FORMATS = {"Q4_1": None, "Q4_0": 2, "Q8_0": 7}
"""llama.cpp's number for a file of that format; None for the format in which the model is shipped."""


class Row(NamedTuple):
    """One token to be processed; `wanted` if the next one is to be predicted from it."""

    token: int
    position: int
    sequence: int
    wanted: bool


class LlamaCpp:
    def __init__(self, weights: str, threads: int) -> None:
        import llama_cpp

        llama_cpp.llama_backend_init()
        self.name = f"llama-cpp-python {llama_cpp.__version__}, {weights}, greedy"
        self.threads = threads
        path = str(gguf_file(weights)).encode()
        self.model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.contexts: dict[tuple[int, int], object] = {}
        self.context: object = None

    def complete(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[list[int]]:
        del temperature  # always greedy, see above
        self.make_room(len(prompts), max(map(len, prompts)) + new_tokens)
        rows = [
            Row(token, position, sequence, wanted=position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        completions = [[token] for token in self.next_tokens(rows)]
        for step in range(new_tokens - 1):
            rows = [
                Row(completion[-1], len(prompt) + step, sequence, wanted=True)
                for sequence, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
            ]
            for completion, token in zip(completions, self.next_tokens(rows), strict=True):
                completion.append(token)
        return completions

    def make_room(self, sequences: int, length: int) -> None:
        """An empty context for that many sequences, each with keys and values of its own; kept for the next time."""
        import llama_cpp

        if (sequences, length) not in self.contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = sequences * length
            params.n_seq_max = sequences
            params.n_batch = BATCH_TOKENS
            params.n_threads = params.n_threads_batch = self.threads
            params.kv_unified = False  # else every sequence attends over the masked keys of all others
            self.contexts[sequences, length] = llama_cpp.llama_init_from_model(self.model, params)
        self.context = self.contexts[sequences, length]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def next_tokens(self, rows: list[Row]) -> Iterator[int]:
        """The likeliest token after every row that is wanted, in order."""
        import llama_cpp
        import numpy

        for start in range(0, len(rows), BATCH_TOKENS):
            chunk = rows[start : start + BATCH_TOKENS]
            self.batch.n_tokens = len(chunk)
            for i, row in enumerate(chunk):
                self.batch.token[i] = row.token
                self.batch.pos[i] = row.position
                self.batch.n_seq_id[i] = 1
                self.batch.seq_id[i][0] = row.sequence
                self.batch.logits[i] = row.wanted
            if llama_cpp.llama_decode(self.context, self.batch) != 0:
                raise RuntimeError("llama_decode failed")
            shape = (sum(row.wanted for row in chunk), self.vocab_size)
            if shape[0]:
                logits = numpy.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), shape)
                yield from logits.argmax(axis=1).tolist()


def gguf_file(weights: str) -> Path:
    """The file as shipped, or requantized from it."""
    from benchmarks.peers.smollm2 import GGUF_FILE, made_once, model_folder

    shipped, number = model_folder() / GGUF_FILE, FORMATS[weights]
    if number is None:
        return shipped

    def requantize(folder: Path) -> None:
        import llama_cpp

        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = number
        params.allow_requantize = True
        if llama_cpp.llama_model_quantize(str(shipped).encode(), str(folder / GGUF_FILE).encode(), params) != 0:
            raise RuntimeError(f"{shipped} could not be requantized to {weights}")

    return made_once(f"gguf-{weights}", requantize) / GGUF_FILE


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", choices=FORMATS, default="Q4_1")
    parser.add_argument("--threads", type=int, default=os.cpu_count())


def load(options: argparse.Namespace) -> System:
    return LlamaCpp(options.weights, options.threads)


if __name__ == "__main__":
    main(__doc__, load, add_options)
