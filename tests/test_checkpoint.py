"""The store is killed at every file operation, damaged in every way, and must always find a whole checkpoint."""

import errno
import json
import logging
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qarl.checkpoint import (
    CheckpointStore,
    load_tensors,
    newest_checkpoint,
    open_checkpoint,
    save_tensors,
    write_atomically,
)
from qarl.errors import ConfigurationError, RunError


def writer(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "learner").mkdir()
        (folder / "learner" / "weights.bin").write_text(content * 100)
        (folder / "prompts.json").write_text(content)

    return write


def save(store: CheckpointStore, step: int, score: float | None = None) -> None:
    store.save(step, writer(f"state {step} "), {"step": step, "version": step + 1})
    if score is not None:
        store.rate(step, score)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refuse(folder: Path) -> None:
    (folder / "half.bin").write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device")


def killed_in_child(work: Callable[[], None]) -> bool:
    """Run `work` in a forked child; whether it died of SIGKILL. Any other failure of the child fails the test."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.waitstatus_to_exitcode(status) == 0
    return killed


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 7, score=0.5)
    found = store.newest()
    assert found is not None
    assert (found.step, found.score, found.metadata) == (7, 0.5, {"step": 7, "version": 8})
    assert (found.folder / "prompts.json").read_text() == "state 7 "
    assert (tmp_path / "latest").read_text() == "step-7\n"
    manifest = json.loads((found.folder / "metadata.json").read_text())["files"]
    assert {name: entry["size"] for name, entry in manifest.items()} == {
        "learner/weights.bin": 800,
        "prompts.json": 8,
    }


def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "new").newest() is None
    assert newest_checkpoint(tmp_path / "absent") is None


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2, 10):
        save(store, step)
    assert names(tmp_path) == ["latest", "step-10", "step-2"]


def test_the_best_is_kept_as_well_and_replaced_by_a_better_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=True)
    for step, score in [(1, 0.2), (2, 0.9), (3, 0.1), (4, None)]:
        save(store, step, score)
    assert names(tmp_path) == ["latest", "step-2", "step-4"]
    save(store, 5, 0.9)
    assert names(tmp_path) == ["latest", "step-5"], "of equals the newest is the best"


def test_a_score_that_is_not_a_number_is_never_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=True)
    for step, score in [(1, 0.2), (2, float("nan")), (3, float("inf")), (4, None)]:
        save(store, step, score)
    assert names(tmp_path) == ["latest", "step-1", "step-4"]


def test_the_best_is_named_and_a_score_given_later_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3, keep_best=True)
    save(store, 1)
    save(store, 2, 0.3)
    found = CheckpointStore(tmp_path).best()
    assert found is not None and (found.step, found.score) == (2, 0.3)
    store.rate(1, 0.4)
    found = store.best()
    assert found is not None and (found.step, found.score, found.metadata) == (1, 0.4, {"step": 1, "version": 2})
    store.rate(9, 1.0)
    assert names(tmp_path) == ["latest", "step-1", "step-2"]


def test_without_scores_there_is_no_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    assert store.best() is None


def test_newest_is_the_last_saved_even_when_its_step_is_lower(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (10, 20, 15):
        save(store, step)
    found = store.newest()
    assert found is not None and found.step == 15


def test_pruning_never_removes_the_last_saved_even_when_its_step_is_lower(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    for step in (20, 15):
        save(store, step)
    assert names(tmp_path) == ["latest", "step-15"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 3)
    store.save(3, writer("new"), {})
    assert (tmp_path / "step-3" / "prompts.json").read_text() == "new"
    assert names(tmp_path) == ["latest", "step-3"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("learner/weights.bin", cut, "damaged, 799 bytes where 800 were written"),
        ("learner/weights.bin", flip, "damaged, 800 bytes where 800 were written but with other content"),
        ("learner/weights.bin", Path.unlink, "weights.bin: No such file or directory"),
        ("metadata.json", cut, "metadata.json is damaged"),
        ("metadata.json", Path.unlink, "metadata.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_the_reason_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Callable[[Path], None], reason: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    damage(tmp_path / "step-2" / file)
    with caplog.at_level(logging.WARNING, logger="qarl.checkpoint"):
        found = store.newest()
    assert found is not None and found.step == 1
    assert reason in caplog.text and "step-2" in caplog.text
    with pytest.raises(ConfigurationError, match="step-2"):
        open_checkpoint(tmp_path / "step-2")


@pytest.mark.parametrize(
    ("written", "damaged"),
    [('"step": 2', '"step": 3'), ('"serial": 2', '"serial": 6'), ('"version": 3', '"version": 2'), ("null", "0.5")],
)
def test_a_record_that_is_not_what_was_written_is_damaged(tmp_path: Path, written: str, damaged: str) -> None:
    """It reads well, and would let a run go on from another step than that of its weights."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    record = tmp_path / "step-2" / "metadata.json"
    assert written in record.read_text()
    record.write_text(record.read_text().replace(written, damaged, 1))
    with pytest.raises(ConfigurationError, match=r"step-2: its metadata\.json is damaged \(its content is not what"):
        open_checkpoint(tmp_path / "step-2")
    found = store.newest()
    assert found is not None and found.step == 1


def test_a_record_of_another_version_says_which_key_it_lacks(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 1)
    record = tmp_path / "step-1" / "metadata.json"
    content = json.loads(record.read_text())
    del content["sha256"]
    record.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"damaged or of another version \(sha256: Field required\)"):
        open_checkpoint(tmp_path / "step-1")


def test_a_file_that_was_not_written_with_a_checkpoint_makes_it_damaged_but_for_hidden_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "step-1" / ".DS_Store").write_text("")
    (tmp_path / "step-1" / ".cache").mkdir()
    (tmp_path / "step-1" / ".cache" / "file").write_text("")
    assert open_checkpoint(tmp_path / "step-1").step == 1
    (tmp_path / "step-1" / "learner" / "added_tokens.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"step-1/learner/added_tokens\.json: was not written with the checkp"):
        open_checkpoint(tmp_path / "step-1")
    assert store.newest() is None


def test_a_place_where_no_checkpoints_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/checkpoints: checkpoints cannot be written here: Not a directory"):
        CheckpointStore(tmp_path / "file" / "checkpoints")


def test_going_back_where_the_disk_refuses_is_a_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(RunError, match=r"step-1: could not be made the newest: No space left on device"):
        store.go_on_from(open_checkpoint(tmp_path / "step-1"))


@pytest.mark.parametrize("content", [None, "", "step-99\n"])
def test_a_lost_or_wrong_marker_costs_nothing(tmp_path: Path, content: str | None) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 4)
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_text(content)
    found = CheckpointStore(tmp_path).newest()
    assert found is not None and found.step == 4


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2):
        save(store, step)
    (tmp_path / "step-2" / "metadata.json").unlink()
    save(store, 3)
    assert {"step-1", "step-3"} <= set(names(tmp_path))


def test_a_full_disk_is_a_run_error_that_names_the_survivor(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(RunError, match=r"step 2 .*No space left on device; .*step-1 is whole"):
        store.save(2, refuse, {})
    assert names(tmp_path) == ["latest", "step-1"]
    assert (tmp_path / "latest").read_text() == "step-1\n"
    save(store, 2)
    assert names(tmp_path) == ["latest", "step-1", "step-2"]


def test_a_full_disk_at_the_first_save_says_that_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no earlier checkpoint"):
        CheckpointStore(tmp_path).save(1, refuse, {})


@pytest.mark.parametrize("call", ["fsync", "rename", "replace", "mkdir"])
def test_a_disk_that_refuses_any_operation_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refused)
        with pytest.raises(RunError, match=r"Input/output error; .*step-\d is whole"):
            save(store, 2)
    found = CheckpointStore(tmp_path).newest()
    assert found is not None and found.step in (1, 2)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_another_failure_of_the_writer_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def interrupted(folder: Path) -> None:
        (folder / "half.bin").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, interrupted, {})
    assert names(tmp_path) == ["latest", "step-1"]


def test_metadata_with_nan_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(ValueError, match="finite number"):
        store.save(1, writer("x"), {"loss": float("nan")})
    assert names(tmp_path) == []


def test_old_checkpoints_that_cannot_be_removed_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)

    def refused(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(shutil, "rmtree", refused)
    with caplog.at_level(logging.WARNING, logger="qarl.checkpoint"):
        save(store, 2)
    assert "old checkpoints could not be removed" in caplog.text
    found = store.newest()
    assert found is not None and found.step == 2


def test_reading_beside_a_running_writer_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-5").mkdir()
    assert newest_checkpoint(tmp_path) is None
    assert names(tmp_path) == [".tmp-step-5"]
    CheckpointStore(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", [2, 3], ids=["replacing a step", "a new step"])
def test_a_kill_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path: Path, step: int) -> None:
    template = tmp_path / "template"
    store = CheckpointStore(template, keep_last=2)
    save(store, 1)
    save(store, 2)
    watched = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.scandir", "os.listdir"}

    def save_until(operation: int, folder: Path) -> None:
        seen = 0

        def kill(event: str, _: tuple[object, ...]) -> None:
            nonlocal seen
            if event in watched:
                seen += 1
                if seen == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        CheckpointStore(folder, keep_last=2).save(step, writer("replacement"), {})

    operation, killed, outcomes = 0, True, set()
    while killed:
        operation += 1
        folder = tmp_path / f"run-{operation}"
        shutil.copytree(template, folder)
        killed = killed_in_child(lambda: save_until(operation, folder))  # noqa: B023
        reopened = CheckpointStore(folder, keep_last=2)
        found = reopened.newest()
        assert found is not None and found.step in (2, step), f"killed before file operation {operation}"
        outcomes.add((found.folder / "prompts.json").read_text())
        assert not [name for name in names(folder) if name.startswith(".")]
        for survivor in folder.glob("step-*"):
            open_checkpoint(survivor)
        save(reopened, 4)
        assert (folder / "latest").read_text() == "step-4\n"
        shutil.rmtree(folder)
    assert outcomes == {"state 2 ", "replacement"}
    assert operation > 20


def test_a_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    def save_for_ever() -> None:
        store = CheckpointStore(tmp_path)
        last = store.newest()
        for step in range(1 + (last.step if last else 0), 100_000):
            save(store, step)

    steps = []
    for attempt in range(5):
        child = os.fork()
        if child == 0:
            try:
                save_for_ever()
            finally:
                os._exit(1)
        # Odd delays, so that the kills fall at different places of a save.
        deadline = time.monotonic() + 20
        floor = steps[-1] if steps else 0
        while not (tmp_path / f"step-{floor + 1}").exists() and time.monotonic() < deadline:
            time.sleep(0.0017 * (attempt + 1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = CheckpointStore(tmp_path).newest()
        assert found is not None
        assert (found.folder / "prompts.json").read_text() == f"state {found.step} "
        steps.append(found.step)
    assert steps == sorted(steps) and steps[0] >= 1


def test_tensors_come_back_with_every_bit_shape_and_dtype(tmp_path: Path) -> None:
    tensors = {
        "step": torch.tensor(3.0),
        "codes": torch.tensor([[-127, 127]], dtype=torch.int8),
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).T,
    }
    save_tensors(tmp_path / "a.safetensors", tensors)
    back = load_tensors(tmp_path / "a.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert back[name].contiguous().view(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().view(-1).view(torch.uint8).tolist()
        )


def test_a_tensor_that_is_elsewhere_is_read_when_it_is_written(tmp_path: Path) -> None:
    known = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
    asked = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return known[name]

    save_tensors(tmp_path / "a.safetensors", {name: torch.empty_like(x) for name, x in known.items()}, read)
    back = load_tensors(tmp_path / "a.safetensors")
    assert sorted(asked) == ["a", "b"]
    assert back["a"].tolist() == [1.0, 2.0] and int(back["b"]) == 3


def test_a_tensor_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1)})
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "a.safetensors")}
    assert len(modes) == 1


def test_a_tensor_file_that_the_disk_refuses_is_an_os_error(tmp_path: Path) -> None:
    def work() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(OSError, match="File too large"):
            save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(10_000)})

    assert not killed_in_child(work)


def test_a_truncated_tensor_file_is_a_run_error_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"a": torch.ones(100)})
    os.truncate(path, 50)
    with pytest.raises(RunError, match=r"a\.safetensors: cannot be read"):
        load_tensors(path)
    with pytest.raises(RunError, match=r"absent\.safetensors"):
        load_tensors(tmp_path / "absent.safetensors")


def test_text_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest"
    write_atomically(path, "old\n")

    def refused(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        with pytest.raises(OSError, match="Input/output"):
            write_atomically(path, "new\n")
    assert path.read_text() == "old\n"
    write_atomically(path, "new\n")
    assert path.read_text() == "new\n"
