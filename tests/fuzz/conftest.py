"""Ways to spoil what a user hands over, shared by the searches here; `QARL_FUZZ=20` searches twenty times as long."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EFFORT = int(os.environ.get("QARL_FUZZ", "1"))

# By default the same examples every time. `max_examples` is what every test multiplies its own number with.
settings.register_profile(
    "fuzz",
    max_examples=EFFORT,
    derandomize=EFFORT == 1,
    database=None,
    deadline=None,
    # The first example that fails tells enough; a smaller one takes minutes to find.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

ODD_TEXTS = ["", " ", "0", "-1", "nan", "true", "..", "/", "a\nb", "\x00", "\u2028", "ß" * 3000, "\U0001f600", "{{"]
ODD_NUMBERS = [0, 1, -1, 2, 3, 7, 2**31, 2**32 + 1, 2**63, -(2**63), 10**12, 10**400, 0.5, -0.0, 1e-320, 1e308]
NO_NUMBERS = [float("nan"), float("inf"), float("-inf")]


class TookTooLongError(BaseException):
    """No `except Exception` of what is tested may take this for an answer."""


def odd_values(texts: list[str]) -> st.SearchStrategy[Any]:
    """Values of every kind that JSON and TOML know, at their edges."""
    plain = st.one_of(
        st.none(), st.booleans(), st.sampled_from(ODD_NUMBERS), st.sampled_from(NO_NUMBERS), st.sampled_from(texts)
    )
    return st.one_of(
        plain, plain, st.lists(plain, max_size=3), st.dictionaries(st.sampled_from(texts), plain, max_size=2)
    )


@pytest.fixture(scope="session")
def spoil_values() -> Callable[[st.DataObject, Any], Any]:
    """A copy of a tree of dicts and lists in which one to three things are something else, gone or too many."""
    return _spoil_values


@pytest.fixture(scope="session")
def spoil_bytes() -> Callable[[st.DataObject, bytes], bytes]:
    """Bytes as a bad copy leaves them: cut short, with a bit turned, with a piece missing, repeated or replaced."""
    return _spoil_bytes


@pytest.fixture(scope="session")
def within() -> Callable[[float], AbstractContextManager[None]]:
    """A limit in seconds to what is done inside, so that a hang is a failure."""
    return _within


def _spoil_values(data: st.DataObject, tree: Any) -> Any:
    changed = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3), label="how many")):
        places = list(_places(changed))
        owner, key = data.draw(st.sampled_from(places), label="where") if places else (None, None)
        if owner is None:
            return data.draw(odd_values(ODD_TEXTS))
        action = data.draw(st.sampled_from(["set", "set", "set", "delete", "add"]), label="what")
        if action == "delete":
            del owner[key]
        elif action == "add" and isinstance(owner, dict):
            owner[data.draw(st.sampled_from(ODD_TEXTS))] = data.draw(odd_values(ODD_TEXTS))
        elif action == "add":
            owner.insert(key, data.draw(odd_values(ODD_TEXTS)))
        else:
            owner[key] = data.draw(odd_values(ODD_TEXTS), label="to")
    return changed


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (owner, key or index) below."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _spoil_bytes(data: st.DataObject, content: bytes) -> bytes:
    spoiled = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3), label="how many")):
        place = data.draw(st.integers(0, max(0, len(spoiled) - 1)), label="where")
        length = data.draw(st.sampled_from([1, 2, 8, 100]), label="how long")
        match data.draw(st.sampled_from(["cut", "flip", "flip", "flip", "remove", "repeat", "replace"]), label="what"):
            case "cut":
                del spoiled[place:]
            case "flip" if spoiled:
                spoiled[place] ^= 1 << data.draw(st.integers(0, 7), label="which bit")
            case "remove":
                del spoiled[place : place + length]
            case "repeat":
                spoiled[place:place] = spoiled[place : place + length]
            case "replace":
                byte = data.draw(st.sampled_from([0, 0xFF, 0x80, ord("["), ord('"'), ord("9")]), label="by")
                spoiled[place : place + length] = bytes([byte]) * length
    return bytes(spoiled)


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TookTooLongError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
