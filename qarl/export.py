"""`qarl export`: weights as a folder that others read: quantized as they were served, the masters, or adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from qarl.build import scheme_plan
from qarl.errors import ConfigurationError
from qarl.models.decoder import HEAD, Decoder
from qarl.models.names import LoadedModel, load_model
from qarl.models.save import new_folder, save_folder, write_folder
from qarl.quant import QuantConfig, Scheme
from qarl.recipe import load_recipe
from qarl.runfolder import checkpoint_at, run_at
from qarl.sync.adapters import write_peft
from qarl.sync.compressed_tensors import QUANTIZATION_CONFIG, check_exportable, quantization_config, stored
from qarl.sync.snapshot import take_snapshot
from qarl.trained import adapters_at, model_named

Form = Literal["compressed-tensors", "hf", "lora"]


def export(source: str, form: Form, out: Path, scheme: str | None = None) -> dict[str, Any]:
    """Write `source`, a run, a checkpoint of one or a model, as the folder `out`, which must not exist or be empty.

    A run has its own scheme; a model is quantized with `scheme`. Adapters are merged into the masters (`hf`), written
    alone (`lora`), or left out beside the codes of their base (`compressed-tensors`). ConfigurationError where the
    scheme has no compressed-tensors form. The head is always written in full precision; `notes` tells what is not as
    it was served.
    """
    path = Path(source)
    run = run_at(path)
    if run is not None and scheme is not None:
        raise ConfigurationError(f"--scheme {scheme}: {source} is a run, which has its own scheme; leave it out")
    version = 0 if run is None else int(str(checkpoint_at(path).metadata["version"]))
    notes: list[str] = []
    if form == "lora":
        _write_adapters(out, source)
    elif form == "hf":
        _refuse_scheme(scheme)
        model = model_named(source)
        save_folder(out, model.config, model.tensors, model.tokenizer, stop_token_ids=model.stop_token_ids)
    elif run is None:
        model = load_model(source)
        notes = _write_quantized(out, model, _of_model(model, scheme), version)
    else:
        notes = _write_run(out, path, version)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return {"source": source, "format": form, "folder": str(out), "version": version, "bytes": size, "notes": notes}


def _write_adapters(out: Path, source: str) -> None:
    trained = adapters_at(Path(source))
    if trained is None:
        raise ConfigurationError(f"{source}: has no adapters, for it is no run with [learner.lora]; choose --format hf")
    with new_folder(out) as folder:
        write_peft(folder, trained.tensors, trained.rank, trained.alpha, trained.recipe.model)


def _write_run(out: Path, path: Path, version: int) -> list[str]:
    """What a run's engine served, in its scheme; of adapters the base alone, since merging them would change codes."""
    run, trained = run_at(path), adapters_at(path)
    assert run is not None
    model = model_named(str(path)) if trained is None else trained.base
    recipe = load_recipe(run.recipe)
    notes = _write_quantized(
        out, model, scheme_plan(model, recipe.scheme, recipe.quant, recipe.engine).quantized, version
    )
    if trained is not None:
        notes.append("this is the base without its adapters: write them with --format lora, and serve both together")
    return notes


def _refuse_scheme(scheme: str | None) -> None:
    if scheme is not None:
        raise ConfigurationError(f"--scheme {scheme}: the masters are not quantized; leave it out with --format hf")


def _of_model(model: LoadedModel, scheme: str | None) -> Mapping[str, Scheme]:
    if scheme is None:
        raise ConfigurationError(f"{model.name}: is no run, so its weights have no scheme yet; give --scheme")
    return scheme_plan(model, scheme, QuantConfig()).quantized


def _write_quantized(out: Path, model: LoadedModel, schemes: Mapping[str, Scheme], version: int) -> list[str]:
    of_layers = {module: scheme for module, scheme in schemes.items() if module != HEAD}
    names = {module: scheme.name for module, scheme in of_layers.items()}
    if not names:
        raise ConfigurationError(f"{model.name}: no layer is quantized; export the masters with --format hf")
    check_exportable(names)
    with torch.device("meta"):
        decoder = Decoder(model.config, model.sampleable)
    decoder.assign(model.tensors, requires_grad=False)
    snapshot = take_snapshot(decoder, of_layers, version)
    tensors = stored(snapshot.tensors, snapshot.schemes)
    if not model.config.tie_embeddings:
        tensors[f"{HEAD}.weight"] = model.tensors[f"{HEAD}.weight"]  # rows that pad the vocabulary too
    linears = [module for module, _ in decoder.matrices()]
    also = {QUANTIZATION_CONFIG: quantization_config(names, linears)}
    write_folder(out, model.config, tensors, model.tokenizer, model.stop_token_ids, also_in_config=also)
    if HEAD not in schemes:
        return []
    return [f"the head was served as {schemes[HEAD].name} and is written in full precision: log-probabilities differ"]
