"""A browser of completions: every token in the colour of its probability under the engine, error tokens marked.

A page holds a sample, of evenly spaced steps and prompts, and says what it left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from markupsafe import Markup

from qarl.errors import ConfigurationError
from qarl.readings import ERROR_TOKEN_LOGPROB, REPETITION_NGRAM, is_error_token, repetition_onset
from qarl.report.history import History
from qarl.report.page import Section
from qarl.tracking.completions import Written, read_completions, step_files
from qarl.trained import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERE = Path(__file__).parent

STEPS_SHOWN = 10
"""Evenly spaced, the first and the last among them."""

TOKEN_BUDGET = 200_000
"""Tokens of all runs on a page, about 15 bytes each, where nobody asks for a number of completions."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """Of a step the completions that a page shows, with their places in the step's file, from 0 on."""

    step: int
    total: int
    chosen: list[tuple[int, Written]]


def browser(histories: Sequence[History], per_step: int | None) -> Section:
    """At most `per_step` completions of each step shown; with None as many as keep the page small."""
    budget = TOKEN_BUDGET // (len(histories) * STEPS_SHOWN) if per_step is None else None
    runs, notes = [], []
    for history in histories:
        samples, said = _sample(history, per_step, budget)
        texts, complaint = _texts(history, samples)
        runs.append({"name": history.name, **_run(samples, texts)})
        notes += [said, *([complaint] if complaint else [])]
    shown = {"floor": ERROR_TOKEN_LOGPROB, "ngram": REPETITION_NGRAM, "runs": [run for run in runs if run["steps"]]}
    if not shown["runs"]:
        return Section("Completions", "", " ".join(notes))
    script, styles = (Markup((HERE / f"completions.{kind}").read_text(encoding="utf-8")) for kind in ("js", "css"))
    spec = Markup(json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))
    html = Markup(
        '<style>{}</style><div class="browser" id="browser"></div>'
        '<script type="application/json" id="completions">{}</script><script>{}</script>'
    ).format(styles, spec, script)
    return Section("Completions", html, " ".join(notes))


def evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of the items, the first and the last among them; all where they are not more."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[0]]
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]


def choose(written: Sequence[Written], most: int | None, budget: int | None) -> list[tuple[int, Written]]:
    """Whole groups of evenly spaced prompts, as far as `most` completions and `budget` tokens go; at least one.

    In the order of the file, with their places there.
    """
    groups: dict[str, list[tuple[int, Written]]] = {}
    for place, one in enumerate(written):
        groups.setdefault(one.prompt_id, []).append((place, one))
    wanted = len(groups) if most is None else max(1, -(-most * len(groups) // max(1, len(written))))
    if budget is not None:
        tokens = sum(len(one.token_ids) for one in written)
        wanted = min(wanted, max(1, budget * len(groups) // max(1, tokens)))
    chosen: list[tuple[int, Written]] = []
    spent = 0
    for pair in (pair for group in evenly_spaced(list(groups.values()), wanted) for pair in group):
        spent += len(pair[1].token_ids)
        if chosen and (len(chosen) == most or (budget is not None and spent > budget)):
            break
        chosen.append(pair)
    return sorted(chosen, key=lambda pair: pair[0])


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> dict[int, str]:
    """What each token adds to a text. Decoded after another one: some tokenizers drop a text's leading space."""
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    lead = decode(before)
    return {one: decode([*before, one]).removeprefix(lead) for one in sorted(set(token_ids))}


def _sample(history: History, per_step: int | None, budget: int | None) -> tuple[list[StepSample], str]:
    """The sample of a run, and what it is a sample of, in words."""
    files = step_files(history.folder.completions)
    if not files:
        return [], f"{history.name}: there are no files in {history.folder.completions}."
    samples, said = [], []
    for step in evenly_spaced(list(files), STEPS_SHOWN):
        written, damaged = read_completions(files[step])
        if damaged:
            said.append(f"{files[step]}: damaged lines are passed over: {', '.join(map(str, damaged))}.")
        if written:
            samples.append(StepSample(step, len(written), choose(written, per_step, budget)))
    kept, total = (
        (sum(counts) for counts in zip(*((len(one.chosen), one.total) for one in samples), strict=True))
        if samples
        else (0, 0)
    )
    left_out = "" if kept == total else "; --completions N shows N of every step"
    summary = (
        f"{history.name}: {kept:,} of the {total:,} completions of {len(samples)} of {len(files)} steps{left_out}."
    )
    return samples, " ".join([summary, *said])


def _texts(history: History, samples: Sequence[StepSample]) -> tuple[dict[int, str] | None, str]:
    """The tokens' texts; None, and why, where the run's tokenizer is gone or is another one now."""
    chosen = [one for sample in samples for _, one in sample.chosen]
    if not chosen:
        return None, ""
    try:
        tokenizer = tokenizer_of(history.folder)
    except ConfigurationError as error:
        return None, f"{history.name}: whole texts only, without their tokens, for {error}."
    if not all(_is_its_text(tokenizer.decode, one) for one in chosen):
        return None, (
            f"{history.name}: whole texts only, without their tokens, for the tokenizer found now decodes them to "
            "other texts than the run wrote."
        )
    return token_texts(tokenizer, (token for one in chosen for token in one.token_ids)), ""


def _is_its_text(decode: Callable[..., Any], written: Written) -> bool:
    text = decode(written.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return bool(text == written.completion)


def _run(samples: Sequence[StepSample], texts: Mapping[int, str] | None) -> dict[str, Any]:
    """A run as `completions.js` reads it; prompts are listed once."""
    prompts: dict[tuple[str, str], int] = {}
    steps = []
    for sample in samples:
        shown = []
        for place, one in sample.chosen:
            prompt = prompts.setdefault((one.prompt_id, one.prompt), len(prompts))
            shown.append({"place": place, "prompt": prompt, **_completion(one, texts)})
        steps.append({"step": sample.step, "total": sample.total, "completions": shown})
    return {"steps": steps, "prompts": list(prompts), "texts": texts}


def _completion(one: Written, texts: Mapping[int, str] | None) -> dict[str, Any]:
    errors = is_error_token(torch.tensor(one.engine_logprobs)).nonzero().flatten().tolist()
    found: dict[str, Any] = {
        "reward": one.reward,
        "terms": one.terms,
        "trained": one.trained,
        "finish": one.finish_reason,
        "errors": errors,
        "onset": repetition_onset(one.token_ids, REPETITION_NGRAM),
        "length": len(one.token_ids),
    }
    if texts is None:
        return found | {"text": one.completion}
    found |= {"ids": one.token_ids, "logprobs": [float(f"{value:.4g}") for value in one.engine_logprobs]}
    # A sign of several tokens cannot be read from any of them.
    is_cut = any("\ufffd" in texts[token] for token in one.token_ids)
    return found | ({"text": one.completion} if is_cut else {})
