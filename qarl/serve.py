"""`qarl serve`: this process becomes the vLLM server that a recipe's runs expect."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from qarl.build import scheme_plan
from qarl.errors import ConfigurationError
from qarl.models.decoder import Decoder
from qarl.models.names import LoadedModel
from qarl.recipe import Recipe
from qarl.rollout.config import VllmEngineConfig
from qarl.rollout.vllm.launch import (
    adapter_arguments,
    as_served,
    command_line,
    require_vllm,
    server_environment,
    write_model,
)
from qarl.sync.checksum import digests
from qarl.sync.snapshot import take_snapshot
from qarl.trained import model_named

CACHE = Path("~/.cache/qarl/served")
"""Where the models lie that servers start from, by a digest of all that they are."""


def serve(recipe: Recipe, host: str, port: int, say: Callable[[str], None]) -> NoReturn:
    """Write the recipe's model as vLLM reads it, unless it is there already, and go on as vLLM's server.

    ConfigurationError for another engine than vLLM, or where vLLM is absent.
    """
    config = recipe.engine
    if not isinstance(config, VllmEngineConfig):
        raise ConfigurationError(f"engine.type = '{config.type}': only vLLM can be served; set engine.type = 'vllm'")
    require_vllm()
    model = model_named(recipe.model)
    with torch.device("meta"):
        decoder = Decoder(model.config, model.sampleable)
    adapters = adapter_arguments(recipe.learner.lora, decoder)
    folder = _write(recipe, config, model, decoder)
    command = command_line(folder, config, recipe.longest_sequence, adapters, host, port)
    say(f"serving {folder} on http://{host}:{port}")
    ours = server_environment(config, has_adapters=recipe.learner.lora is not None)
    os.execve(command[0], command, {**os.environ, **ours})


def _write(recipe: Recipe, config: VllmEngineConfig, model: LoadedModel, decoder: Decoder) -> Path:
    schemes = scheme_plan(model, recipe.scheme, recipe.quant, config)
    decoder.assign(model.tensors, requires_grad=False)
    snapshot = take_snapshot(decoder, schemes.quantized, 0)
    published = digests(snapshot.tensors)
    served, _ = as_served(snapshot, model.sampleable, getattr(torch, config.dtype), published)
    whole = repr((served.checksum, served.schemes, model.config, config.head_dtype))
    folder = CACHE.expanduser() / hashlib.sha256(whole.encode()).hexdigest()[:32]
    if not folder.exists():
        write_model(folder, model.config, served, config.head_dtype)
    return folder
