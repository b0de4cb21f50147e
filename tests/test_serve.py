"""`qarl serve`: the model that a server starts from, and the command that this process becomes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from qarl import serve as module
from qarl.errors import ConfigurationError
from qarl.models.names import load_model
from qarl.recipe import Recipe, load_recipe
from qarl.rollout.vllm import launch
from qarl.rollout.vllm.service import SERVED
from qarl.serve import serve
from qarl.trained import model_named

SMOKE = Path(__file__).resolve().parents[1] / "recipes" / "smoke.toml"


class Became(Exception):
    """In place of a process that is replaced: nothing after it runs."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], dict[str, str]]]:
    """The commands, with their environments, that this process became; vLLM seems to be there."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> NoReturn:
        assert path == command[0]
        found.append((command, environment))
        raise Became

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.setattr(module, "CACHE", tmp_path / "served")
    monkeypatch.setattr(module, "require_vllm", lambda: None)
    return found


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe(SMOKE, ["--engine.type=vllm", *overrides])


def start(recipe: Recipe) -> list[str]:
    """What was said."""
    said: list[str] = []
    with pytest.raises(Became):
        serve(recipe, "0.0.0.0", 8001, said.append)
    return said


def test_only_vllm_is_served() -> None:
    with pytest.raises(ConfigurationError, match=r"engine\.type = 'native': only vLLM can be served; set engine\.type"):
        serve(load_recipe(SMOKE), "h", 1, print)


def test_without_vllm_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(launch, "version", missing)
    monkeypatch.setattr(module, "CACHE", tmp_path / "served")
    with pytest.raises(ConfigurationError, match="vLLM is not installed"):
        serve(recipe_of(), "h", 1, print)
    assert not (tmp_path / "served").exists()


def test_this_process_becomes_a_server_of_the_recipes_model(
    became: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    recipe = recipe_of("--scheme=w4a16", "--engine.max_concurrency=7", "--prompts.max_prompt_tokens=100")
    [said] = start(recipe)
    [(command, environment)] = became
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    values = dict(itertools.pairwise(command))
    assert (values["--host"], values["--port"], values["--max-num-seqs"]) == ("0.0.0.0", "8001", "7")
    assert values["--max-model-len"] == "116"  # of a prompt and a completion
    assert (environment["MINE"], environment["VLLM_SERVER_DEV_MODE"]) == ("kept", "1")
    assert "--no-enable-lora" in command and environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert environment["VLLM_CPU_INT4_W4A8"] == "0"
    assert json.loads(environment[SERVED])["max_concurrency"] == 7
    folder = Path(values["--model"])
    assert said == f"serving {folder} on http://0.0.0.0:8001"

    config = AutoConfig.from_pretrained(folder)
    model = model_named(recipe.model)
    assert (config.vocab_size, config.dtype) == (model.sampleable, torch.bfloat16)
    assert config.quantization_config["format"] == "pack-quantized"
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embeddings, model.tensors["model.embed_tokens.weight"][: model.sampleable].to(torch.bfloat16))


def test_a_model_that_is_there_is_not_written_again_and_another_one_lies_beside_it(
    became: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(recipe_of())
    with monkeypatch.context() as closed:
        closed.setattr(module, "write_model", lambda *arguments: pytest.fail("written again"))
        start(recipe_of("--engine.max_concurrency=7"))
    start(recipe_of("--scheme=fp8"))
    start(recipe_of("--engine.dtype=float32"))
    model = load_model("tiny")
    longer = dataclasses.replace(model.config, max_position_embeddings=4096)  # the same tensors
    monkeypatch.setattr(module, "model_named", lambda name: dataclasses.replace(model, config=longer))
    start(recipe_of())
    first, again, *others = (command[command.index("--model") + 1] for command, _ in became)
    assert first == again
    assert len({first, *others}) == 4 and all(Path(folder).is_dir() for folder in others)


def test_a_recipe_with_adapters_starts_a_server_that_takes_them(became: list[tuple[list[str], dict[str, str]]]) -> None:
    start(recipe_of("--learner.lora={rank=9, targets=['*.q_proj', '*.k_proj']}"))
    [(command, environment)] = became
    assert "--enable-lora" in command and environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    place = command.index("--lora-target-modules")
    assert command[place + 1 : place + 3] == ["k_proj", "q_proj"]
    assert command[command.index("--max-lora-rank") + 1] == "16"
