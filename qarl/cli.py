"""The command line. Nothing heavy is imported before a command runs, so that `--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, validators

from qarl import __version__
from qarl.cluster.launch import end, is_follower, leading, record
from qarl.errors import ConfigurationError, RunError
from qarl.interrupts import Interrupted
from qarl.process import hash_alike, prepare

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

app = App(
    name="qarl",
    version=__version__,
    help="Reinforcement learning of language models with low-bit rollouts, trained exactly as served.",
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # `main` says what was saved
)
bench = App(name="bench", help="Measure speed on this machine.")
app.command(bench)

Flag = Parameter(negative="", show_default=False)
Json = Annotated[bool, Flag, Parameter(name="--json", help="Print one JSON object as the last line.")]
Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        show_default=False,
        help="Recipe keys to change: --learner.lr=1e-5 --rewards.0.weight=2; values are TOML. "
        "Another `type` starts its table afresh.",
    ),
]
Scheme = Annotated[str, Parameter(help="Quantization scheme: none, w8a8-int8, ... (`qarl doctor` lists them).")]
Model = Annotated[str, Parameter(help="A folder, a run, a hub id, or a known name (tiny, smollm2-135m).")]
Alignment = Annotated[
    Literal["auto", "none"], Parameter(help="auto: the learner computes as the engine does; none: in full precision.")
]
Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Batch = Annotated[Count, Parameter(help="Sequences at a time.")]
PromptLength = Annotated[Count, Parameter(help="Tokens of every prompt.")]
NewTokens = Annotated[Count, Parameter(help="Tokens of every completion.")]
KvCache = Annotated[Literal["fp32", "int8"], Parameter(help="Number format of the engine's cached keys and values.")]
Repeats = Annotated[Count | None, Parameter(help="Timed repetitions, of which the median is told; by default 5.")]
Threads = Annotated[Count | None, Parameter(help="Threads to compute with; by default one a core, as torch takes.")]


@app.command
def train(
    recipe: Annotated[Path, Parameter(help="A TOML recipe.")],
    /,
    *overrides: Overrides,
    run_dir: Annotated[Path | None, Parameter(help="Run folder; by default a new one in runs/.")] = None,
    resume: Annotated[
        str, Parameter(help="auto: go on where --run-dir has a checkpoint; never; or a run folder to go on from.")
    ] = "auto",
    dry_run: Annotated[bool, Flag, Parameter(help="Check everything and say what would happen.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model by a recipe; under `torchrun`, on all its processes."""
    if is_follower():
        from qarl.build import build_follower
        from qarl.cluster.follower import serve

        return serve(build_follower)

    from qarl.recipe import load_recipe, to_toml

    resolved = load_recipe(recipe, overrides)

    from qarl import run
    from qarl.build import build
    from qarl.tracking.console import Console

    start = run.open_run(resolved, recipe.stem, run_dir, resume)
    console = Console(sys.stderr if as_json else sys.stdout, start.step, resolved.steps)
    with leading(to_toml(resolved), resolved.cluster) as crew:
        system = build(resolved, console.rolling_out, crew)
        act = run.dry_run if dry_run else run.train
        result = act(resolved, system, start, console)
    if as_json:
        _answer(result, as_json)


@app.command
def compare(
    experiment: Annotated[Path, Parameter(help="A TOML file: a recipe, seeds, and arms that change its keys.")],
    /,
    *,
    short: Annotated[bool, Flag, Parameter(help="The short version that the file's [short] table describes.")] = False,
    arms: Annotated[str | None, Parameter(help="Run these only: a,b; by default all.")] = None,
    seeds: Annotated[str | None, Parameter(help="Run these only: 0,1; by default all.")] = None,
    processes: Annotated[
        Count | None, Parameter(help="Runs at a time; by default cores by --threads, on a GPU one.")
    ] = None,
    threads: Annotated[Count, Parameter(help="Threads of every run.")] = 1,
    out: Annotated[Path | None, Parameter(help="Folder of runs and results; by default runs/<name>[-short].")] = None,
    run: Annotated[
        bool, Parameter(negative="--no-run", show_default=False, help="Run nothing, and tell what is there.")
    ] = True,
    retry_failed: Annotated[bool, Flag, Parameter(help="Try failed runs again, from their last checkpoints.")] = False,
    source: Annotated[
        Path | None, Parameter(name="--from", help="Make table and page anew from this results.json; run nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run arms by seeds and compare them: a table, a page, and results to keep. Goes on where it was interrupted."""
    from qarl.compare.command import compare, rebuild

    if source is not None:
        if arms or seeds or processes or retry_failed or not run:
            raise ConfigurationError(
                "--from runs nothing: leave --arms, --seeds, --processes, --retry-failed, --no-run out"
            )
        found = rebuild(experiment, source, short, out)
    else:
        found = compare(
            experiment,
            is_short=short,
            arms=arms.split(",") if arms else (),
            seeds=seeds.split(",") if seeds else (),
            processes=processes,
            threads=threads,
            out=out,
            runs=run,
            retry_failed=retry_failed,
        )
    if as_json:
        _answer(found, as_json)
    else:
        print(Path(found["table"]).read_text(encoding="utf-8"), f"page: {found['page']}", sep="\n", flush=True)


@app.command(name="eval")
def evaluate(
    model: Annotated[str, Parameter(help="A run folder (its newest checkpoint is asked), or a model.")],
    /,
    *overrides: Overrides,
    prompts: Annotated[
        str | None, Parameter(help="A file of questions, or arithmetic, reasoning_gym, ...; by default the run's own.")
    ] = None,
    samples: Annotated[
        Count | None,
        Parameter(
            name=["-k", "--samples"], help="Answers a question; the k of pass@k. By default the run's own, else 1."
        ),
    ] = None,
    count: Annotated[
        Count | None, Parameter(help="How many questions; by default all of a file, as many as the run asks, else 200.")
    ] = None,
    temperature: Annotated[
        float | None,
        Parameter(help="Divides the logits; 0 takes the likeliest token. By default the run's own, else 1."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a model held-out questions; those of a run are asked as in its training."""
    from qarl.assess import assess

    _answer(assess(model, prompts, samples, count, temperature, overrides, say=_progress), as_json)


@app.command
def align(
    model: Model,
    /,
    *,
    scheme: Scheme,
    engine: Annotated[Literal["native", "vllm"], Parameter(help="The engine to compare the learner with.")] = "native",
    tokens: Annotated[Count, Parameter(help="How many sampled tokens to compare, at least.")] = 5000,
    kv_cache: KvCache = "fp32",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        Parameter(help="Of what vLLM does not quantize, by default bfloat16."),
    ] = None,
    alignment: Alignment = "auto",
    as_json: Json = False,
) -> None:
    """Measure how far engine and learner disagree, token by token and layer by layer."""
    from qarl import align

    found = align.align(model, scheme, tokens, _engine_table(engine, kv_cache, dtype), alignment, _say_count)
    _answer(found, as_json)
    reason = align.broken_promise(found) if engine == "native" else None
    if reason is not None:
        raise RunError(reason)


def _engine_table(engine: str, kv_cache: str, dtype: str | None) -> dict[str, str]:
    """A recipe's `engine`; ConfigurationError for an option that this one has no use for."""
    if engine == "native":
        if dtype is not None:
            raise ConfigurationError(f"--dtype {dtype}: our own engine computes in float32; it is for --engine vllm")
        return {"type": engine, "kv_cache": kv_cache}
    if kv_cache != "fp32":
        raise ConfigurationError(f"--kv-cache {kv_cache}: vLLM has no such cache; it is for --engine native")
    return {"type": engine, "dtype": dtype or "bfloat16"}


@app.command
def export(
    source: Annotated[str, Parameter(help="A run folder (its newest checkpoint), a checkpoint, or a model.")],
    /,
    *,
    form: Annotated[
        Literal["compressed-tensors", "hf", "lora"],
        Parameter(
            name="--format",
            help="Quantized as served, for vLLM and others; the full-precision masters; or a run's adapters alone.",
        ),
    ],
    out: Annotated[Path, Parameter(help="A folder that does not exist yet.")],
    scheme: Annotated[str | None, Parameter(help="How to quantize a model; a run has its own scheme.")] = None,
    as_json: Json = False,
) -> None:
    """Write weights as a model folder that others read."""
    from qarl.export import export

    _answer(export(source, form, out, scheme), as_json)


@app.command
def report(
    runs: Annotated[list[Path], Parameter(help="Run folders.", negative="")],
    /,
    *,
    out: Annotated[Path, Parameter(help="The HTML file to write; one that is there is replaced.")],
    completions: Annotated[
        int | None,
        Parameter(
            validator=validators.Number(gte=0),
            help="Completions to show of each of ten steps; by default as many as keep the page small, 0: none.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        Parameter(
            name="--align",
            validator=validators.Number(gte=0),
            help="Also compare engine and learner layer by layer, over this many tokens of each run's newest weights.",
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Write one HTML page about one or several runs: curves, completions token by token, recipes."""
    from qarl.report.runs import report

    _answer(report(runs, out, completions, tokens, _progress, _say_count), as_json)


@app.command
def serve(
    recipe: Annotated[Path, Parameter(help="A TOML recipe, with engine.type = 'vllm'.")],
    /,
    *overrides: Overrides,
    host: Annotated[str, Parameter(help="Address to listen on: who reaches it can change the weights.")] = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=65535))] = 8000,
) -> None:
    """Become the vLLM server that runs of this recipe use where `engine.urls` names it."""
    from qarl.recipe import load_recipe

    resolved = load_recipe(recipe, overrides)

    from qarl.serve import serve

    serve(resolved, host, port, _progress)


@bench.command(name="rollout")
def bench_rollout(
    *,
    model: Model = "smollm2-135m",
    scheme: Scheme = "w8a8-int8",
    batch: Batch = 64,
    prompt_len: PromptLength = 64,
    new_tokens: NewTokens = 64,
    kv_cache: KvCache = "fp32",
    repeats: Repeats = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Tokens per second of the engine."""
    from qarl.bench.runs import rollout

    _use_threads(threads)
    _answer(rollout(model, scheme, batch, prompt_len, new_tokens, kv_cache, repeats), as_json)


@bench.command(name="learner")
def bench_learner(
    *,
    model: Model = "smollm2-135m",
    scheme: Scheme = "w8a8-int8",
    batch: Batch = 16,
    prompt_len: PromptLength = 64,
    new_tokens: NewTokens = 64,
    repeats: Repeats = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Tokens per second of the learner's update."""
    from qarl.bench.runs import learner

    _use_threads(threads)
    _answer(learner(model, scheme, batch, prompt_len, new_tokens, repeats), as_json)


@bench.command(name="step")
def bench_step(
    *,
    model: Model = "smollm2-135m",
    scheme: Scheme = "w8a8-int8",
    batch: Batch = 32,
    group_size: Annotated[Count, Parameter(help="Completions of every prompt.")] = 8,
    prompt_len: Annotated[
        Count | None, Parameter(help="Random prompts of this many tokens, and no early stop; by default, sums.")
    ] = None,
    new_tokens: NewTokens = 32,
    alignment: Alignment = "auto",
    kv_cache: KvCache = "fp32",
    repeats: Repeats = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Seconds of a whole training step."""
    from qarl.bench.runs import step

    _use_threads(threads)
    _answer(step(model, scheme, batch, group_size, prompt_len, new_tokens, alignment, kv_cache, repeats), as_json)


@bench.command(name="kernels")
def bench_kernels(
    *,
    model: Model = "smollm2-135m",
    scheme: Scheme = "w8a8-int8",
    batch: Batch = 64,
    context: Annotated[Count, Parameter(help="Tokens that every sequence sees.")] = 128,
    kv_cache: KvCache = "fp32",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Speed of every operation of one decode step."""
    from qarl.bench.kernels import kernels

    _use_threads(threads)
    _answer(kernels(model, scheme, batch, context, kv_cache), as_json)


def _use_threads(count: int | None) -> None:
    """The kernels share torch's OpenMP threads."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


@app.command
def doctor(*, as_json: Json = False) -> None:
    """Show versions, the processor, and which kernels are real, emulated or absent."""
    from qarl.doctor import examine

    _answer(examine(), as_json)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 misused, 130 interrupted."""
    hash_alike()
    prepare()
    end(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; the reason of a failure is the last line on stderr.

    What is neither a fault of the configuration nor of the run is ours, and keeps its traceback.
    """
    try:
        app(list(arguments), exit_on_error=False, print_error=False)
    except (CycloptsError, ConfigurationError) as error:
        return _refuse(error, MISUSED)
    except RunError as error:
        return _refuse(error, FAILED)
    except Interrupted as error:
        return _refuse(error, INTERRUPTED)
    except KeyboardInterrupt:
        return _refuse("interrupted; nothing was saved since the last checkpoint", INTERRUPTED)
    except BrokenPipeError:
        # Who read the answer has left, as `head` does; Python would complain when it flushes the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return DONE


def _refuse(reason: object, code: int) -> int:
    record(str(reason))
    _progress(f"qarl: {reason}")
    return code


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_count(done: int, wanted: int) -> None:
    _progress(f"compared {done} of {wanted} tokens")


def _answer(result: Mapping[str, Any], as_json: bool) -> None:
    """The result on standard output, as one JSON line or for people."""
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        print("\n".join(_lines(result)), flush=True)


def _lines(result: Mapping[str, Any], indent: str = "") -> list[str]:
    """`key  value` lines; what is nested is indented below its key, lists of mappings as tables."""
    width = max((len(key) for key in result), default=0)
    lines = []
    for key, value in result.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}", *_lines(value, indent + "  ")]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines += [f"{indent}{key}", *(f"{indent}  {line}" for line in _table(value))]
        else:
            lines.append(f"{indent}{key:<{width}}  {_shown(value)}")
    return lines


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Aligned columns under their keys, whose words stand on one another; text to the left, numbers to the right."""
    height = max(len(name.split("_")) for name in rows[0])
    columns = []
    for name in rows[0]:
        words, values = name.split("_"), [row[name] for row in rows]
        cells = [""] * (height - len(words)) + words + [_shown(value, digits=4) for value in values]
        width = max(map(len, cells))
        is_text = all(isinstance(value, str) for value in values)
        columns.append([cell.ljust(width) if is_text else cell.rjust(width) for cell in cells])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def _shown(value: object, digits: int = 6) -> str:
    if isinstance(value, float):
        # Large figures in full: nobody reads 1.2e+04 in a column.
        return f"{value:.0f}" if 10**digits <= abs(value) < 1e12 else f"{value:.{digits}g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return "-" if value is None else str(value)
