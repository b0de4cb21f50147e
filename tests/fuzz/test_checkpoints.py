"""Damaged checkpoints: what is opened has every byte that was written, or an older one is taken, or none."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.build import build
from qarl.checkpoint import METADATA, CheckpointStore, newest_checkpoint, open_checkpoint
from qarl.errors import ConfigurationError
from qarl.recipe import load_recipe
from qarl.run import open_run, train
from qarl.tracking.console import Console

FUZZ = settings.get_profile("fuzz")  # of conftest.py

SMOKE = Path(__file__).resolve().parents[2] / "recipes" / "smoke.toml"
SMALL = ("--prompts_per_step=2", "--group_size=4", "--sampling.max_new_tokens=8", "--eval.count=4", "--steps=3")
EVERY = ("--checkpoint.every=1", "--checkpoint.keep_last=9")

STEPS = (1, 2)
SPOIL = Callable[[st.DataObject, Any], Any]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def saved() -> dict[int, dict[str, bytes]]:
    """The files of two checkpoints of a store, by step."""

    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text('{"hidden_size": 32}')
        (folder / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 2)
        (folder / "learner.json").write_text(f'{{"version": {folder.name[-1]}}}')

    with tempfile.TemporaryDirectory() as name:
        store = CheckpointStore(Path(name))
        for step in STEPS:
            store.save(step, write, {"version": step, "prompts": f"{step}" * 64})
        store.rate(1, 0.5)
        return {step: contents(Path(name, f"step-{step}")) for step in STEPS}


def lay_out(folder: Path, saved: dict[int, dict[str, bytes]]) -> None:
    for step, files in saved.items():
        for file, content in files.items():
            path = folder / f"step-{step}" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def damage(data: st.DataObject, folder: Path, spoil_bytes: SPOIL) -> None:
    """Do something to one file of one checkpoint."""
    step = data.draw(st.sampled_from(STEPS), label="step")
    place = folder / f"step-{step}"
    name = data.draw(st.sampled_from(sorted(contents(place))), label="file")
    what = ["bytes", "bytes", "bytes", "missing", "extra", "swapped", "folder", "renamed"]
    match data.draw(st.sampled_from(what), label="what"):
        case "bytes":
            (place / name).write_bytes(spoil_bytes(data, (place / name).read_bytes()))
        case "missing":
            (place / name).unlink()
        case "extra":
            extra = data.draw(st.sampled_from(["model/added_tokens.json", "model/model.bin", "state.pt", "x/y.json"]))
            (place / extra).parent.mkdir(exist_ok=True)
            (place / extra).write_bytes(b"{}")
        case "swapped":
            other = folder / f"step-{STEPS[0] + STEPS[1] - step}" / name
            mine = (place / name).read_bytes()
            (place / name).write_bytes(other.read_bytes())
            other.write_bytes(mine)
        case "folder":
            (place / name).unlink()
            (place / name).mkdir()
        case "renamed":
            (place / name).rename(place / f"{name}.bak")


@settings(FUZZ, max_examples=200 * FUZZ.max_examples)
@given(data=st.data())
def test_what_is_opened_has_every_byte_that_was_written(
    saved: dict[int, dict[str, bytes]], spoil_bytes: SPOIL, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder, saved)
        damage(data, folder, spoil_bytes)
        opened = [step for step in STEPS if opens_whole(folder / f"step-{step}", saved[step])]
        found = newest_checkpoint(folder)
        assert (found.step if found is not None else None) == max(opened, default=None)


def opens_whole(place: Path, files: dict[str, bytes]) -> bool:
    """Whether the checkpoint opens; then everything in it must be what was written, but for blanks in its manifest."""
    step = int(place.name.removeprefix("step-"))
    try:
        found = open_checkpoint(place)
    except ConfigurationError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert place.name in refusal and "\n" not in refusal
        assert contents(place) != files, "a whole checkpoint is refused"
        return False
    assert (found.step, found.score) == (step, 0.5 if step == 1 else None)
    assert found.metadata == {"version": step, "prompts": f"{step}" * 64}
    assert {**contents(place), METADATA: b""} == {**files, METADATA: b""}
    return True


def test_every_bit_of_a_checkpoint_is_watched(saved: dict[int, dict[str, bytes]], tmp_path: Path) -> None:
    """One bit turned, at each place of its small files and at some of the large one; blanks between words aside."""
    lay_out(tmp_path, saved)
    for name, content in saved[2].items():
        path = tmp_path / "step-2" / name
        for place in range(len(content)) if len(content) < 400 or name == METADATA else range(0, len(content), 61):
            turned = bytearray(content)
            turned[place] ^= 1 << place % 8
            path.write_bytes(turned)
            if not content[place : place + 1].isspace():
                with pytest.raises(ConfigurationError, match="step-2"):
                    open_checkpoint(tmp_path / "step-2")
        path.write_bytes(content)
    assert open_checkpoint(tmp_path / "step-2").step == 2


def train_in(folder: Path, resume: str = "auto") -> int:
    """Train by the small recipe; the step it went on from."""
    recipe = load_recipe(SMOKE, [*SMALL, *EVERY])
    start = open_run(recipe, "fuzz", folder, resume)
    train(recipe, build(recipe), start, Console(io.StringIO(), start.step, recipe.steps))
    return start.step


@pytest.fixture(scope="session")
def trained() -> Any:
    """A finished run of three steps, with a checkpoint of each."""
    with tempfile.TemporaryDirectory() as name:
        train_in(Path(name, "run"))
        yield Path(name, "run")


@settings(FUZZ, max_examples=4 * FUZZ.max_examples)
@given(data=st.data())
def test_a_run_goes_on_from_an_older_checkpoint_to_the_same_end_or_refuses(
    trained: Path, spoil_bytes: SPOIL, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        shutil.copytree(trained, folder)
        place = folder / "checkpoints" / "step-3"
        files = [file for file in sorted(contents(place)) if file != "model/model.safetensors"]
        file = place / data.draw(st.sampled_from([*files, "model/model.safetensors"]), label="file")
        spoiled = spoil_bytes(data, file.read_bytes())
        was_damaged = spoiled != file.read_bytes()
        file.write_bytes(spoiled)
        assert train_in(folder) in ((2,) if was_damaged and file.name != METADATA else (2, 3))
        expected, found = contents(trained / "checkpoints" / "step-3"), contents(place)
        # The manifest counts how often was saved.
        assert {**found, METADATA: b""} == {**expected, METADATA: b""}
        assert contents(folder / "completions") == contents(trained / "completions")


def test_a_pickle_in_a_checkpoint_is_never_opened(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    for step in (1, 2, 3):
        place = folder / "checkpoints" / f"step-{step}"
        (place / "optimizer.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "opened")))
    with pytest.raises(ConfigurationError, match="all its checkpoints are damaged"):
        train_in(folder)
    assert not (tmp_path / "opened").exists()


class Bomb:
    """What a pickle can do to those who open it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)
