"""`qarl export`: weights as a model folder that others read, quantized as they were served, or the masters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from qarl.build import scheme_plan
from qarl.errors import ConfigurationError
from qarl.models.decoder import HEAD, Decoder
from qarl.models.names import LoadedModel, load_model
from qarl.models.save import save_folder, write_folder
from qarl.quant import QuantConfig, Scheme
from qarl.recipe import load_recipe
from qarl.runfolder import checkpoint_at, run_at
from qarl.sync.compressed_tensors import QUANTIZATION_CONFIG, check_exportable, quantization_config, stored
from qarl.sync.snapshot import take_snapshot

Form = Literal["compressed-tensors", "hf"]


def export(source: str, form: Form, out: Path, scheme: str | None = None) -> dict[str, Any]:
    """Write `source`, a run, a checkpoint of one or a model, as the folder `out`, which must not exist or be empty.

    A run has its own scheme; a model is quantized with `scheme`. ConfigurationError where the scheme has no
    compressed-tensors form. The head is always written in full precision; `notes` tells where it was not so served.
    """
    path = Path(source)
    run = run_at(path)
    if run is None:
        model, version = load_model(source), 0
        schemes = _of_model(model, form, scheme)
    else:
        if scheme is not None:
            raise ConfigurationError(f"--scheme {scheme}: {source} is a run, which has its own scheme; leave it out")
        checkpoint = checkpoint_at(path)
        model, version = load_model(str(checkpoint.folder / "model")), int(str(checkpoint.metadata["version"]))
        recipe = load_recipe(run.recipe)
        schemes = scheme_plan(model, recipe.scheme, recipe.quant, recipe.engine).quantized
    if form == "hf":
        save_folder(out, model.config, model.tensors, model.tokenizer, stop_token_ids=model.stop_token_ids)
        notes = []
    else:
        notes = _write_quantized(out, model, schemes, version)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return {"source": source, "format": form, "folder": str(out), "version": version, "bytes": size, "notes": notes}


def _of_model(model: LoadedModel, form: Form, scheme: str | None) -> Mapping[str, Scheme]:
    if form == "hf":
        if scheme is not None:
            raise ConfigurationError(f"--scheme {scheme}: the masters are not quantized; leave it out with --format hf")
        return {}
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
