"""One run from its recipe to its summary: resume, train, evaluate, save, and leave everything in the run folder."""

from __future__ import annotations

import hashlib
import json
import logging
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from qarl import loop
from qarl.build import System
from qarl.checkpoint import Checkpoint, CheckpointStore, has_checkpoints, last_saved, write_atomically
from qarl.errors import ConfigurationError, RunError
from qarl.evaluate import evaluate
from qarl.health import Watch
from qarl.interrupts import Interrupted, Interrupts
from qarl.metrics import Metrics, values
from qarl.readings import error_lines, refuse_errors
from qarl.recipe import Recipe, changed_keys, load_recipe, to_toml
from qarl.records import Group, GroupRewards
from qarl.runfolder import RunFolder, checkpoint_at, run_at
from qarl.tracking import Trackers
from qarl.tracking.completions import Completions
from qarl.tracking.console import Console, LogLines
from qarl.tracking.jsonl import EVALUATIONS_FILE, METRICS_FILE, MetricsFiles, read_lines
from qarl.tracking.picture import draw
from qarl.tracking.tensorboard import TensorBoard

log = logging.getLogger("qarl")

EVALUATION_STEP = -1
"""In the place of a step in the seed of held-out answers: no training step has it, so the draws are apart, and they
are the same at every evaluation, so that two of them differ by the weights alone."""

FREE_TO_CHANGE = (
    "eval",
    "checkpoint",
    "health",
    "cluster",
    "max_reward_error_share",
    "learner.max_skipped_updates",
    "prompts.on_long",
    "prompts.max_prompt_tokens",
    "engine.kv_bytes",
    "engine.max_concurrency",
    "engine.prefill_tokens",
    "engine.urls",
    "engine.transport",
    "engine.folder",
    "engine.timeout_s",
    "engine.start_timeout_s",
)
"""Keys that may differ when a run is resumed: they do not change what the steps before computed. So may `steps`, under
a constant learning rate; other schedules stretch over them."""

FORMAT = 3
"""Of what a run's checkpoints hold; another one is not read."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run lives, the checkpoint it goes on from, if there is one, and keys that were other when it began.

    `seen` is what was found in the folder when this was decided.
    """

    folder: RunFolder
    checkpoint: Checkpoint | None
    changed: tuple[str, ...] = ()
    seen: tuple[bool, int] = (False, 0)

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint is not None else 0


def open_run(recipe: Recipe, name: str, run_dir: Path | None, resume: str) -> Start:
    """Decide where to run and from where.

    `resume` is "auto" (go on where `run_dir` has a checkpoint), "never", or a run folder or checkpoint to go on
    from. Without `run_dir` a new folder `runs/<name>-<time>` is taken. Nothing is written.
    """
    if resume not in ("auto", "never"):
        return _resume_from(recipe, Path(resume), run_dir)
    if run_dir is None:
        run_dir = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(run_dir.absolute())  # wherever a reward function may change to
    if not folder.recipe.exists():
        return Start(folder, None, seen=_seen(folder))
    if resume == "never":
        raise ConfigurationError(f"{run_dir}: already holds a run; choose another --run-dir, or --resume auto to go on")
    if not has_checkpoints(folder.checkpoints):
        _check_nothing_is_lost(folder)
        return Start(folder, None, _changes(recipe, folder), _seen(folder))
    return _start(recipe, folder, checkpoint_at(folder.path))


def train(recipe: Recipe, system: System, start: Start, console: Console) -> dict[str, Any]:
    """Run to the last step and summarize, in words on the console too.

    On SIGINT or SIGTERM the last finished step is saved and `Interrupted` says how to go on.
    """
    started = time.perf_counter()
    folder = start.folder
    with folder.lock(), _logging(folder.log, console), Interrupts(log.warning) as interrupts:
        if _seen(folder) != start.seen:
            raise ConfigurationError(f"{folder.path}: another process has run there meanwhile; give the command again")
        _tell(system, start)
        _restore(system, start.checkpoint)  # before anything is written: it may refuse
        with _refusing_disk(folder):
            write_atomically(folder.recipe, to_toml(recipe))
            store = CheckpointStore(folder.checkpoints, recipe.checkpoint.keep_last, recipe.checkpoint.keep_best)
            if start.checkpoint is not None:
                store.go_on_from(start.checkpoint)
            trackers = _trackers(folder, start.step, console)
        run = _Run(recipe, system, store, trackers, start)
        try:
            loop.train(system.cast, system.plan, run.done, run, interrupts)
            run.finish(interrupts)
        except Interrupted:
            run.save()
            raise Interrupted(
                f"interrupted after {run.done} of {recipe.steps} steps, which are saved; "
                f"go on with the same recipe and --resume {folder.path}"
            ) from None
        except (ConfigurationError, RunError) as error:
            raise type(error)(f"{error}; {run.keep()}") from error
        except Exception:
            log.error("this failure is not one that qarl foresees; %s", run.keep())
            raise
        finally:
            trackers.close()
        summary = summarize(folder.path, recipe) | {
            "seconds": time.perf_counter() - started,
            "tracker_failures": trackers.failures,
            "picture": _picture(folder.path),
        }
        best = store.best() if recipe.checkpoint.keep_best else None
        if best is not None:
            summary |= {"best_checkpoint": str(best.folder), "best_held_out": best.score}
        log.info("%s", describe(summary))
    return summary


def _tell(system: System, start: Start) -> None:
    """The log's first lines: what was resolved, and what may not have been meant."""
    log.info("run folder %s", start.folder.path)
    log.info("%s", system.account)
    for warning in system.warnings:
        log.warning("%s", warning)
    if start.changed:
        log.warning("goes on with other values of %s", ", ".join(start.changed))


def _restore(system: System, checkpoint: Checkpoint | None) -> None:
    """Weights and optimizer from the checkpoint, if there is one; then the engine serves the learner's weights.

    RunError where the run would not be the same any more.
    """
    learner = system.cast.learner
    if checkpoint is not None:
        if checkpoint.metadata["prompts"] != _last_prompts(system, checkpoint.step):
            raise RunError(
                f"{checkpoint.folder}: the prompts of step {checkpoint.step} are no longer those that were trained on: "
                "the data, its generator, the chat template, the tokenizer, or (where prompts are left out as too "
                "long) prompts.on_long or prompts.max_prompt_tokens changed; put it back, or start a new run from "
                "this checkpoint's model"
            )
        learner.restore(checkpoint.folder)
        log.info("resuming after %d steps from %s", checkpoint.step, checkpoint.folder)
    system.cast.engine.load(learner.publish())


def _last_prompts(system: System, done: int) -> str:
    """What identifies the prompts of the last of so many steps, and all of finite data."""
    source, plan = system.cast.prompts, system.plan
    prompts = source.take(plan.rounds_of(done - 1).start, plan.prompts_per_step) if done else []
    asked = [source.fingerprint, *([list(prompt.token_ids), prompt.row] for prompt in prompts)]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def _refusing_disk(folder: RunFolder) -> Iterator[None]:
    """RunError for what the disk refuses before the first step."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or folder.path}: cannot be written: {error.strerror or error}; make room, or choose "
            "another --run-dir; nothing was lost"
        ) from error


def dry_run(recipe: Recipe, system: System, start: Start, console: Console) -> dict[str, Any]:
    """Say what `train` would do; writes nothing."""
    console.say(to_toml(recipe))
    console.say(system.account)
    for warning in system.warnings:
        console.say(f"warning: {warning}")
    todo = (
        f"would run steps {start.step + 1} to {recipe.steps}"
        if start.step < recipe.steps
        else "has no step left to run"
    )
    console.say(f"{todo} in {start.folder.path}; nothing was trained")
    plan = {"run_dir": str(start.folder.path), "first_step": start.step, "steps": recipe.steps}
    return {"dry_run": True, **plan, "recipe": recipe.model_dump(mode="json")}


def summarize(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """What a run came to, from its files: reward, held-out accuracy before and after, and the alignment measured."""
    steps = read_lines(folder / METRICS_FILE)
    evaluations = read_lines(folder / EVALUATIONS_FILE)
    summary: dict[str, Any] = {"run_dir": str(folder), "steps": len(steps), "alignment": measured_alignment(steps)}
    if steps:
        summary["reward_first"] = steps[0].get("reward/mean")
        summary["reward_last"] = steps[-1].get("reward/mean")
        summary["skipped_updates"] = int(sum(row.get("optim/skipped") or 0 for row in steps))
    if recipe.eval is not None:
        name = pass_at_1(recipe.eval.name)
        measured = [row[name] for row in evaluations if name in row]
        if measured:
            summary["held_out_before"], summary["held_out_after"] = measured[0], measured[-1]
    return summary


def measured_alignment(steps: list[dict[str, Any]]) -> str:
    """`exact` if engine and learner agreed on every token's bits in every step, else how far they were apart."""
    shares = [row["mismatch/bit_equal"] for row in steps if row.get("mismatch/bit_equal") is not None]
    if not shares:
        return "not measured"
    if min(shares) == 1.0:
        return "exact"
    differences = [row["mismatch/max_abs"] for row in steps if "mismatch/max_abs" in row]
    # What is not finite is null in the file.
    largest = "not finite" if None in differences else f"{max(differences):.3g}"
    return f"not exact: bit-equal {min(shares):.4f} of tokens at worst, largest difference {largest}"


def _picture(folder: Path) -> str | None:
    """Draw the run; what is wrong with a picture is no reason to fail at the very end."""
    try:
        return str(draw(folder))
    except OSError as error:
        log.warning("%s: no picture was drawn: %s", folder, error)
        return None


def describe(summary: Mapping[str, Any]) -> str:
    """The summary for people."""
    lines = [f"finished {summary['steps']} steps in {summary['seconds']:.1f} s"]
    figures = [
        f"{summary[key]:.3f} {when}"
        for key, when in (("held_out_before", "before"), ("held_out_after", "after"))
        if summary.get(key) is not None
    ]
    if figures:
        lines.append(f"held-out pass@1: {', '.join(figures)}")
    if summary.get("skipped_updates"):
        lines.append(f"{summary['skipped_updates']} updates were skipped, their gradients were not finite; see run.log")
    if "best_checkpoint" in summary:
        lines.append(f"best checkpoint: {summary['best_checkpoint']}, held-out pass@1 {summary['best_held_out']:.3f}")
    lines.append(f"alignment measured: {summary['alignment']}")
    if summary["tracker_failures"]:
        lines.append(f"{summary['tracker_failures']} trackers failed, see run.log")
    lines.append(f"run folder: {summary['run_dir']}")
    return "\n".join([*lines, *([f"picture: {summary['picture']}"] if summary["picture"] else [])])


def pass_at_1(name: str) -> str:
    """The metric by which weights are compared, for held-out questions of this name."""
    return f"eval/{name}/pass@1"


class _Run:
    """Follows the loop: measures, tracks and saves; knows how far the run is and whether that is on disk."""

    def __init__(
        self, recipe: Recipe, system: System, store: CheckpointStore, trackers: Trackers, start: Start
    ) -> None:
        self.done = start.step
        self._recipe = recipe
        self._system = system
        self._cast = system.cast
        self._questions = system.questions
        self._store = store
        self._trackers = trackers
        self._watch = Watch(recipe.health)
        for row in read_lines(start.folder.path / METRICS_FILE):
            self._watch.look(row)  # signs go on over a stop
        self._saved = start.checkpoint.step if start.checkpoint is not None else None
        self._optimizer_steps = self._cast.learner.optimizer_steps

    def before_step(self, step: int) -> Metrics:
        every = self._recipe.eval.every if self._recipe.eval is not None else 0
        return self._measure(step) if step == 0 or (every and step % every == 0) else {}

    def after_rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        for line in error_lines(rewards):
            log.warning("step %d: %s", step + 1, line)
        self._trackers.rollout(step, groups, rewards)
        refuse_errors(rewards, self._recipe.max_reward_error_share)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackers.step(step, {**metrics, **_memory()})
        self.done = step + 1
        self._optimizer_steps = self._cast.learner.optimizer_steps
        warnings, reasons = self._watch.look(metrics)
        for warning in warnings:
            log.warning("step %d: %s", self.done, warning)
        if reasons:
            raise RunError(f"stopped after step {self.done}: {'; '.join(reasons)}")
        if self.done % self._recipe.checkpoint.every == 0:
            self.save()

    def finish(self, interrupts: Interrupts) -> None:
        """Save, then measure the final weights."""
        self.save()
        with interrupts.allowed():
            self._measure(self._recipe.steps)

    def save(self) -> None:
        """Store the state after the last finished step, unless it is stored already."""
        if self._saved != self.done:
            learner = self._cast.learner
            metadata: dict[str, JsonValue] = {
                "format": FORMAT,
                "version": learner.version,
                "prompts": _last_prompts(self._system, self.done),
            }
            checkpoint = self._store.save(self.done, learner.save, metadata)
            self._saved = self.done
            log.info("saved %s", checkpoint.folder)

    def keep(self) -> str:
        """After a failure: save the last finished step, unless the next one has begun to change the weights; says what
        there is to go on from."""
        learner = self._cast.learner
        if (learner.optimizer_steps, learner.version) == (self._optimizer_steps, self.done):
            try:
                self.save()
            except Exception as error:  # the failure before is what is to be told
                log.error("the last finished step could not be saved: %s", error)
        kept = self._store.newest()
        return f"{kept.folder} is the last checkpoint" if kept is not None else "no checkpoint was saved yet"

    def _measure(self, step: int) -> Metrics:
        """Held-out figures of the weights after `step` steps; none without held-out questions."""
        if self._questions is None:
            return {}
        seed = (self._recipe.seed, EVALUATION_STEP)
        metrics = evaluate(self._cast.engine, self._cast.reward, self._questions, seed)
        self._trackers.evaluation(step, values(metrics))
        if self._saved == step:
            self._store.rate(step, metrics[pass_at_1(self._questions.name)].value())
        return metrics


def _memory() -> dict[str, float]:
    """`memory/peak`: the most bytes this process has held at a time so far."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory/peak": float(kilobytes) * (1 if sys.platform == "darwin" else 1024)}  # macOS counts bytes


def _trackers(folder: RunFolder, first_step: int, console: Console) -> Trackers:
    console.open()
    return Trackers(
        MetricsFiles(folder.path, first_step),
        [
            Completions(folder.completions, first_step),
            TensorBoard(folder.events, first_step),
            console,
        ],
    )


def _resume_from(recipe: Recipe, path: Path, run_dir: Path | None) -> Start:
    folder = run_at(path)
    if folder is None:
        raise ConfigurationError(f"--resume {path}: is no run folder (it has no recipe.toml) and no checkpoint of one")
    if run_dir is not None and run_dir.resolve() != folder.path.resolve():
        raise ConfigurationError(f"--resume {path}: a run goes on in its own folder; leave --run-dir {run_dir} out")
    return _start(recipe, RunFolder(folder.path.absolute()), checkpoint_at(path.absolute()))


def _start(recipe: Recipe, folder: RunFolder, checkpoint: Checkpoint) -> Start:
    if checkpoint.metadata.get("format") != FORMAT:
        raise ConfigurationError(
            f"{checkpoint.folder}: written by another version of qarl; finish the run with that one, or start a new "
            f"run from its weights: model = '{checkpoint.folder / 'model'}'"
        )
    if checkpoint.step > recipe.steps:
        raise ConfigurationError(
            f"steps = {recipe.steps}: {checkpoint.folder} is already past them; raise steps, or take an earlier "
            "checkpoint"
        )
    return Start(folder, checkpoint, _changes(recipe, folder), _seen(folder))


def _seen(folder: RunFolder) -> tuple[bool, int]:
    """Whether a run has begun here, and how often it has saved."""
    return folder.recipe.exists(), last_saved(folder.checkpoints)


def _check_nothing_is_lost(folder: RunFolder) -> None:
    """A run without checkpoints starts again, unless it must have had some."""
    steps = len(read_lines(folder.path / METRICS_FILE))
    if steps > load_recipe(folder.recipe).checkpoint.every:  # killed in its first save, it has as many
        raise ConfigurationError(
            f"{folder.checkpoints}: the checkpoints of {steps} finished steps are gone; put them back, or choose "
            "another --run-dir to start again"
        )


def _changes(recipe: Recipe, folder: RunFolder) -> tuple[str, ...]:
    """Keys that are not as the run began; ConfigurationError where one of them must be."""
    free_keys = (*FREE_TO_CHANGE, "steps") if recipe.learner.schedule.type == "constant" else FREE_TO_CHANGE
    changed = changed_keys(load_recipe(folder.recipe), recipe)
    fixed = [key for key in changed if not any(key == free or key.startswith(f"{free}.") for free in free_keys)]
    if fixed:
        raise ConfigurationError(
            f"{folder.recipe}: the run was started with other values of {', '.join(fixed)}; resume it with those, or "
            "choose another --run-dir for a new run"
        )
    return tuple(changed)


class _LogFile(logging.FileHandler):
    """`run.log`. What a full disk refuses of it is lost there alone: the console has the same lines."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def _logging(path: Path, console: Console) -> Iterator[None]:
    """The run's own log goes to `run.log` with times and to the console without, for as long as the run lasts."""
    with _refusing_disk(RunFolder(path.parent)):
        to_file = _LogFile(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers = (to_file, LogLines(console))
    level = log.level
    log.setLevel(logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    except (ConfigurationError, RunError, Interrupted) as error:
        # To the file alone: on the terminal the reason is the command's last line.
        to_file.handle(logging.LogRecord(log.name, logging.ERROR, __file__, 0, "%s", (error,), None))
        raise
    finally:
        for handler in handlers:
            log.removeHandler(handler)
        to_file.close()
        log.setLevel(level)
