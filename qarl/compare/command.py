"""`qarl compare`: run what is missing of an experiment, then tell what all of it came to."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from qarl.checkpoint import write_atomically
from qarl.compare.experiment import Comparison, choose, load_comparison
from qarl.compare.jobs import Job, jobs_in
from qarl.compare.page import write_comparison
from qarl.compare.pool import Command, Pool, train_command
from qarl.compare.progress import Narrator
from qarl.compare.results import Results, measure, read_results
from qarl.compare.table import early_ends, main_rows, write_table
from qarl.errors import ConfigurationError, RunError
from qarl.interrupts import Interrupted
from qarl.ops.device import missing_for_cuda
from qarl.report.figures import plotly_script
from qarl.runfolder import RunLock

RESULTS_FILE, TABLE_FILE, PAGE_FILE = "results.json", "table.md", "page.html"


def compare(
    path: Path,
    *,
    is_short: bool = False,
    arms: Sequence[str] = (),
    seeds: Sequence[str] = (),
    processes: int | None = None,
    threads: int = 1,
    out: Path | None = None,
    runs: bool = True,
    retry_failed: bool = False,
    stream: TextIO = sys.stderr,
    command: Command = train_command,
) -> dict[str, Any]:
    """Run the arms and seeds chosen, `processes` at a time with so many threads each, and write what is there of all.

    Without `runs` nothing is run. Interrupted after a signal, when those that ran have saved; RunError where all that
    was run failed.
    """
    comparison = load_comparison(path, is_short)
    chosen = choose(comparison, arms, seeds)
    name = comparison.name + ("-short" if is_short else "")
    out = out or Path("runs") / name
    every_job = jobs_in(out, choose(comparison, (), ()))
    todo = [job for job in every_job if _is_due(job, retry_failed) and (job.arm, job.seed) in chosen] if runs else []
    plotly_script()  # where it is missing, that is to be known before the work
    if todo:
        _check_nobody_runs(todo)
        with RunLock(out, "--out"), Narrator(comparison.experiment, todo, stream) as narrator:
            pool = Pool(command, processes or default_processes(comparison, threads), threads, narrator)
            try:
                pool.run(todo)
            except Interrupted:
                _write(out, name, comparison, every_job)
                raise Interrupted(f"interrupted; what ran is saved in {out}: give the same command to go on") from None
            except OSError as error:
                raise RunError(
                    f"{error.filename or out}: {error.strerror or error}; runs were ended, and go on from their "
                    "checkpoints with the same command when this is mended"
                ) from error
    answer = _write(out, name, comparison, every_job)
    if todo and not any(job.outcome().state in ("finished", "stopped") for job in todo):
        raise RunError(f"no run finished: {todo[0].name}: {todo[0].outcome().reason}; see {todo[0].console}")
    return answer


def rebuild(path: Path, source: Path, is_short: bool, out: Path | None) -> dict[str, Any]:
    """Table and page from results that were kept, beside them or in `out`."""
    return tell(read_results(source, load_comparison(path, is_short)), out or source.parent)


def tell(results: Results, out: Path) -> dict[str, Any]:
    """Write table and page; returns where they are, and what they say."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / TABLE_FILE, write_table(results))
    write_comparison(out / PAGE_FILE, results)
    return {
        "table": str(out / TABLE_FILE),
        "page": str(out / PAGE_FILE),
        "runs": dict(Counter(run.state for run in results.runs)),
        "arms": main_rows(results),
        "early_ends": early_ends(results),
    }


def default_processes(comparison: Comparison, threads: int) -> int:
    """As many as the cores have threads for; where a run may take the GPU, one."""
    takes_gpu = any(recipe.device != "cpu" for arm in comparison.arms for recipe in arm.recipes.values())
    if takes_gpu and missing_for_cuda() is None:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def _is_due(job: Job, retry_failed: bool) -> bool:
    return job.outcome().state in ("unfinished", *(["failed"] if retry_failed else []))


def _check_nobody_runs(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.folder.is_running():
            raise ConfigurationError(f"{job.folder.path}: another process runs it; wait for its end, or stop it")


def _write(out: Path, name: str, comparison: Comparison, jobs: Sequence[Job]) -> dict[str, Any]:
    results = Results.of(name, comparison, [measure(job, comparison.experiment) for job in jobs])
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / RESULTS_FILE, results.to_json())
    return tell(results, out)
