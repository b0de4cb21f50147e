"""The order in which rows become prompts: a function of (seed, step), so that a resumed run sees the same ones."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

from pydantic import Field

from qarl.config import Config
from qarl.errors import ConfigurationError
from qarl.prompts.chat import Renderer, Tokenizer
from qarl.prompts.rows import Row
from qarl.records import Prompt
from qarl.roles import PromptSource

SEED_BITS = 32
"""Seeds of generated rows: 32 bits, because some generators accept no more; the top bit marks held-out rows."""

REDRAWS = 100

PROBED_ROWS, PROBED_AT_ONCE, PROBE_S = 256, 8, 2.0
"""How many generated rows are tried at the start, how many from one seed, and after how many seconds that is enough."""


class SplitSource(PromptSource, Protocol):
    """A prompt source that keeps some questions for evaluation."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What people may not have meant, a line each."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """`count` prompts that training does not see; the same ones whatever the run's seed."""
        ...

    def known(self) -> Iterator[Prompt]:
        """Prompts that others can check before training: all of finite data, some hundred of generated."""
        ...


class SourceConfig(Config):
    """What every prompt source can be told."""

    system: str | None = Field(default=None, description="System message put before every prompt.")
    chat: bool | Literal["auto"] = Field(
        default="auto", description='Render with the chat template; "auto": if the tokenizer has one.'
    )
    template_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments for the chat template, such as {enable_thinking = false}."
    )
    max_prompt_tokens: int = Field(default=1024, ge=1, description="Longest prompt, in tokens.")
    on_long: Literal["error", "skip"] = Field(
        default="error", description="What a longer prompt is: an error, or left out and counted."
    )

    @property
    def held_out_key(self) -> str | None:
        """The key that keeps rows from training; generated rows need none."""
        return None

    def renderer(self, tokenizer: Tokenizer) -> Renderer:
        return Renderer(tokenizer, self.system, self.chat, self.max_prompt_tokens, self.on_long, self.template_args)


class Rows(Protocol):
    """Finite data, by index."""

    name: str

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...


class RowStream(Protocol):
    """Endless data: fresh rows for every seed."""

    name: str

    def draw(self, seed: int, count: int) -> Sequence[Row]:
        """`count` rows, a function of the seed (0 <= seed < 2**32); their ids and `where` are set by the caller."""
        ...


class FinitePrompts:
    """Prompts of finite data: a new permutation every epoch, in which no row comes twice.

    Every row is rendered once at the start, so that a bad row is found before training, not hours into it, and that
    `warnings` can say whether some are both trained on and held out. Step k takes positions k * count and on: keep
    `count` the same for a run. `held_out` rows come from `evaluation`, or else are a share `held_out_share` of the
    rows, evenly spaced, whatever the seed.
    """

    def __init__(
        self, rows: Rows, renderer: Renderer, seed: int, evaluation: Rows | None = None, held_out_share: float = 0.0
    ) -> None:
        self._renderer = renderer
        self._seed = seed
        training, reserved = split(len(rows), held_out_share)
        self._rows = rows
        self._held_out_rows = rows if evaluation is None else evaluation
        held_out = reserved if evaluation is None else range(len(evaluation))
        content = hashlib.sha256()
        fitting, fitting_held_out = self._fitting(rows, training, content), self._fitting(self._held_out_rows, held_out)
        self.fingerprint = content.hexdigest()
        self._training, self._held_out = list(fitting), list(fitting_held_out)
        self.skipped = len(training) + len(held_out) - len(self._training) - len(self._held_out)
        self.warnings = (*renderer.warnings, *_leaks(rows.name, fitting, fitting_held_out))
        if not self._training:
            raise ConfigurationError(
                f"{rows.name}: no row is left to train on: {len(rows)} rows, {len(reserved)} held out, "
                f"{self.skipped} too long; raise prompts.max_prompt_tokens or lower prompts.eval_fraction"
            )

    def take(self, step: int, count: int) -> list[Prompt]:
        """The prompts at positions step * count to (step + 1) * count of the endless sequence of epochs.

        Asking for more at a time than there are is an error.
        """
        if count > len(self._training):
            raise ConfigurationError(
                f"{self._rows.name}: {count} prompts at a time are asked for, {len(self._training)} are there, so that "
                "a batch would hold one twice; ask for fewer (prompts_per_step; --count of `qarl eval`) or add rows"
            )
        prompts = []
        for position in range(step * count, (step + 1) * count):
            epoch, index = divmod(position, len(self._training))
            order = permutation(len(self._training), self._seed, epoch)
            prompts.append(self._prompt(self._rows, self._training[order[index]]))
        return prompts

    def held_out(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts; asking for more than there are is an error."""
        if count > len(self._held_out):
            raise ConfigurationError(
                f"{self._rows.name}: {count} held-out prompts are asked for, {len(self._held_out)} are there; ask for "
                "fewer, or set prompts.eval_path (a file of their own) or a larger prompts.eval_fraction"
            )
        return [self._prompt(self._held_out_rows, index) for index in self._held_out[:count]]

    def known(self) -> Iterator[Prompt]:
        """Every prompt once, those to train on first."""
        yield from (self._prompt(self._rows, index) for index in self._training)
        yield from (self._prompt(self._held_out_rows, index) for index in self._held_out)

    @property
    def num_training(self) -> int:
        """Rows that are trained on."""
        return len(self._training)

    def _fitting(self, rows: Rows, indices: Sequence[int], content: hashlib._Hash | None = None) -> dict[int, int]:
        """Of the rows that are short enough, the index and a hash of the prompt's tokens; `content` takes in all of
        them, to the token and to the columns."""
        found = {}
        for index in indices:
            prompt = self._renderer.render(rows.row(index))
            if prompt is None:
                continue
            found[index] = hash(prompt.token_ids)
            if content is not None:
                content.update(json.dumps([list(prompt.token_ids), prompt.row], sort_keys=True, default=str).encode())
        return found

    def _prompt(self, rows: Rows, index: int) -> Prompt:
        prompt = self._renderer.render(rows.row(index))
        assert prompt is not None, "only rows that fit are kept"
        return prompt


class GeneratedPrompts:
    """Prompts of endless data: fresh rows for every (seed, step); held-out rows come from seeds of their own.

    Some are rendered at the start, so that what most runs would stop at is found before training.
    """

    def __init__(self, stream: RowStream, renderer: Renderer, seed: int) -> None:
        self._stream = stream
        self._renderer = renderer
        self._seed = seed
        self.skipped = 0
        self.fingerprint = ""  # rows are not known before they are drawn
        deque(self.known(), maxlen=0)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._renderer.warnings

    def take(self, step: int, count: int) -> list[Prompt]:
        """`count` fresh prompts, named `<source>/<step>-<index>`."""
        return self._draw(f"train/{self._seed}/{step}", str(step), count, held_out=False)

    def held_out(self, count: int) -> list[Prompt]:
        """`count` prompts from seeds that training never uses, named `<source>/held-out-<index>`."""
        return self._draw("held-out", "held-out", count, held_out=True)

    def known(self) -> Iterator[Prompt]:
        """Prompts as they may come up, of the run's seed but of no step: as many as `PROBE_S` seconds give."""
        start = time.monotonic()
        for batch in range(PROBED_ROWS // PROBED_AT_ONCE):
            seed = row_seed(f"probe/{self._seed}/{batch}", PROBED_AT_ONCE, held_out=False)
            for index, row in enumerate(self._stream.draw(seed, PROBED_AT_ONCE)):
                id = f"{self._stream.name}/probe-{batch * PROBED_AT_ONCE + index}"
                prompt = self._renderer.render(Row(id, row.content, row.columns, f"generated row {id}"))
                if prompt is not None:
                    yield prompt
            if time.monotonic() - start > PROBE_S:
                return

    def _draw(self, key: str, label: str, count: int, held_out: bool) -> list[Prompt]:
        prompts: list[Prompt] = []
        drawn = 0
        for attempt in range(REDRAWS):
            missing = count - len(prompts)
            for row in self._stream.draw(row_seed(f"{key}/{attempt}", missing, held_out), missing):
                id = f"{self._stream.name}/{label}-{drawn}"
                drawn += 1
                prompt = self._renderer.render(Row(id, row.content, row.columns, f"generated row {id}"))
                if prompt is not None:
                    prompts.append(prompt)
            if len(prompts) == count:
                self.skipped += drawn - count
                return prompts
        raise ConfigurationError(
            f"{self._stream.name}: {drawn} rows were drawn and only {len(prompts)} of {count} prompts are short "
            "enough; raise prompts.max_prompt_tokens"
        )


def _leaks(name: str, training: Mapping[int, int], held_out: Mapping[int, int]) -> Iterator[str]:
    """A line about prompts that are on both sides; both map a row to a hash of its prompt."""
    asked = set(held_out.values())
    both = sum(prompt in asked for prompt in training.values())
    if both:
        yield (
            f"{name}: {both} of {len(training)} prompts to train on are also held out, word for word, so that held-out "
            "figures flatter the model; remove them from one side"
        )


@lru_cache(maxsize=2)
def permutation(length: int, seed: int, epoch: int) -> tuple[int, ...]:
    """0 .. length - 1 in the order of an epoch."""
    order = list(range(length))
    random.Random(f"epoch/{seed}/{epoch}").shuffle(order)
    return tuple(order)


def split(length: int, share: float) -> tuple[list[int], list[int]]:
    """Indices to train on and, evenly spaced, a share (0 to 1, rounded to whole rows) of them to hold out."""
    count = round(length * share)
    reserved = [(2 * n + 1) * length // (2 * count) for n in range(count)]
    taken = set(reserved)
    return [index for index in range(length) if index not in taken], reserved


def row_seed(key: str, count: int, held_out: bool) -> int:
    """A seed from a name; seed to seed + count - 1, which some generators use up, stays in training's or in the
    held-out half of the seeds."""
    half = 1 << (SEED_BITS - 1)
    assert 0 < count < half
    digest = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())
    return digest % (half - count) + (half if held_out else 0)
