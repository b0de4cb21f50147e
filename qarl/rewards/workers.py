"""Scoring by terms that run other people's code: what the run sees of their worker processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from qarl.errors import ConfigurationError, RunError
from qarl.records import Group, Prompt
from qarl.rewards.keeper import Call, Result, packed
from qarl.rewards.term import Failure, ForeignTerm, Outcome

STDERR = 2
"""Where everything goes that workers print: standard output belongs to the command's answer."""

END_SECONDS = 10.0


class Workers:
    """Worker processes for these terms. They are started when they are first needed, and end with this object.

    An exception in the middle of a call (an interrupt too) ends them, so that no answer is ever read for another call;
    the next call starts new ones. ConfigurationError and RunError that a term raises arrive as themselves.
    """

    def __init__(self, terms: Sequence[ForeignTerm]) -> None:
        self._terms = tuple(terms)
        self._keeper: _Keeper | None = None

    def prepare(self) -> None:
        """ConfigurationError where a term cannot work."""
        self._ask([(term, packed(None)) for term in range(len(self._terms))])

    def check(self, prompts: Sequence[Prompt]) -> None:
        """ConfigurationError for the first prompt whose completions a term could not score."""
        for term, config in enumerate(self._terms):
            results = self._ask([(term, packed(prompt)) for prompt in prompts])
            for prompt, result in zip(prompts, results, strict=True):
                if isinstance(result, Failure):
                    raise ConfigurationError(
                        f"reward {config.label}: the row of prompt {prompt.id} cannot be checked: {result.reason}"
                    )

    def score(self, groups: Sequence[Group]) -> dict[str, list[list[Outcome]]]:
        """By the terms' labels: for every group one outcome for each of its completions, in order."""
        parts = [
            (term, index, part)
            for term, config in enumerate(self._terms)
            for index, group in enumerate(groups)
            for part in config.calls(group)
            if part.completions
        ]
        results = self._ask([(term, packed(part)) for term, _, part in parts])
        outcomes: dict[str, list[list[Outcome]]] = {term.label: [[] for _ in groups] for term in self._terms}
        for (term, index, part), result in zip(parts, results, strict=True):
            outcomes[self._terms[term].label][index] += _each(result, len(part.completions))
        return outcomes

    def close(self) -> None:
        """End all processes, and whatever those have started."""
        if self._keeper is not None:
            self._keeper.end()
            self._keeper = None

    def _ask(self, calls: Sequence[Call]) -> list[Result]:
        """Results of the calls, in order; the first error among them is raised."""
        if not calls:
            return []
        try:
            if self._keeper is None:
                self._keeper = _Keeper(self._terms)
            results = self._keeper.ask(calls)
        except BaseException:
            self.close()
            raise
        for result in results:
            if isinstance(result, ConfigurationError | RunError):
                raise result
        return results


class _Keeper:
    """The keeper's process, seen from the run."""

    def __init__(self, terms: Sequence[ForeignTerm]) -> None:
        self._connection, theirs = Pipe()
        # The program of the run is not run again, as `multiprocessing` would; what can be imported is the same.
        command = (
            f"import sys; sys.path[:] = {sys.path!r}; from qarl.rewards.keeper import main; main({theirs.fileno()})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.end = weakref.finalize(self, _end, process, self._connection)
        self._connection.send(terms)

    def ask(self, calls: Sequence[Call]) -> list[Result]:
        try:
            self._connection.send(calls)
            return self._connection.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionError) as error:
            raise RunError(
                "the process that keeps the reward workers has ended; its last words are above, or the system was "
                "short of memory and killed it"
            ) from error


def _end(process: subprocess.Popen[bytes], connection: Connection[Any, Any]) -> None:
    """The keeper ends its workers and itself when the connection is closed."""
    # Also where a fork of the run still holds a copy of it.
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
    connection.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _each(result: Result, count: int) -> Iterator[Outcome]:
    if isinstance(result, Failure):
        return iter([result] * count)
    assert isinstance(result, list) and len(result) == count, f"{result!r} for {count} completions"
    return iter(result)
