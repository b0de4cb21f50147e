"""LoRA: which matrices of a decoder have an adapter, how it begins, and its names, which are those of PEFT.

y = x W^T + (alpha / rank) x A^T B^T (Hu et al. 2021, arXiv 2106.09685). Shape letters: N out, K in, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from pydantic import Field
from torch import Tensor

from qarl.config import Config
from qarl.errors import ConfigurationError
from qarl.models.decoder import Decoder
from qarl.ops.adapter import LowRank
from qarl.ops.device import HOST

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""PEFT's names: the module's name in Hugging Face's model class between the first and one of the others."""


class LoraConfig(Config):
    """Adapters that are trained on a frozen base. There is no dropout: engine and learner would no longer agree."""

    rank: int = Field(16, ge=1, description="Rows of A and columns of B.")
    alpha: float = Field(32.0, gt=0.0, description="The adapter's product is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("*",),
        strict=False,
        min_length=1,
        description="Patterns (as in a shell: * ? [abc]) of the decoder projections that get an adapter, for example "
        '`["*.q_proj", "*.v_proj"]`; by default all of them.',
    )

    def modules(self, decoder: Decoder) -> list[str]:
        """The projections that the targets name, in the decoder's order; ConfigurationError where one names none."""
        names = projection_shapes(decoder)
        for target in self.targets:
            if not any(fnmatchcase(name, target) for name in names):
                near = get_close_matches(target, names, n=1, cutoff=0.0)[0]
                raise ConfigurationError(
                    f'learner.lora.targets: "{target}" matches no decoder projection; they are named like {near}'
                )
        return [name for name in names if any(fnmatchcase(name, target) for target in self.targets)]


def projection_shapes(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """Names and shapes [N, K] of the matrices that may have an adapter."""
    return {
        name: (linear.weight.shape[0], linear.weight.shape[1])
        for projection in decoder.projections()
        for name, linear in zip(projection.names, projection.linears, strict=True)
    }


def new_adapters(decoder: Decoder, config: LoraConfig, seed: int) -> dict[str, LowRank]:
    """Adapters of the targets, by module, as PEFT begins them: A uniform within 1 / sqrt(K), B zero."""
    generator = torch.Generator(HOST).manual_seed(seed)
    shapes, found = projection_shapes(decoder), {}
    for module in config.modules(decoder):
        height, width = shapes[module]
        bound = 1.0 / math.sqrt(width)  # Kaiming-uniform with a = sqrt(5)
        a = torch.empty(config.rank, width, device=HOST).uniform_(-bound, bound, generator=generator)
        found[module] = LowRank(a.to(decoder.device), torch.zeros(height, config.rank, device=decoder.device))
    return found


def train_adapters(decoder: Decoder, adapters: Mapping[str, LowRank]) -> None:
    """Let these take the gradients of what the decoder's adapters are part of, and nothing else any."""
    decoder.requires_grad_(False)
    for adapter in adapters.values():
        adapter.a.requires_grad_()
        adapter.b.requires_grad_()
    for projection in decoder.projections():
        projection.low_rank = tuple(map(adapters.get, projection.names))


def named_tensors(adapters: Mapping[str, LowRank]) -> dict[str, Tensor]:
    """A and B of every module by PEFT's names."""
    return {
        f"{PREFIX}{module}{part}": tensor
        for module, adapter in adapters.items()
        for part, tensor in ((A, adapter.a), (B, adapter.b))
    }


def adapters_named(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]], rank: int
) -> dict[str, LowRank]:
    """The inverse of `named_tensors`, in the order of `shapes` [N, K] by module.

    ValueError for a tensor that is missing, misshaped, or of no such module.
    """
    modules = [name for name in shapes if any(f"{PREFIX}{name}{part}" in tensors for part in (A, B))]
    wanted: dict[str, tuple[int, int]] = {}
    for module in modules:
        height, width = shapes[module]
        wanted |= {f"{PREFIX}{module}{A}": (rank, width), f"{PREFIX}{module}{B}": (height, rank)}
    for name, shape in wanted.items():
        if name not in tensors:
            raise ValueError(f"tensor {name} is missing")
        if tensors[name].shape != shape:
            raise ValueError(f"tensor {name} has shape {list(tensors[name].shape)} instead of {list(shape)}")
    if strange := sorted(tensors.keys() - wanted.keys()):
        raise ValueError(f"tensor {strange[0]} does not belong to this model")
    return {m: LowRank(tensors[f"{PREFIX}{m}{A}"], tensors[f"{PREFIX}{m}{B}"]) for m in modules}


def merged(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Weights by Hugging Face's names, with scale B A added to those that `adapters`, by PEFT's names, belong to.

    The others are not copied.
    """
    found = dict(weights)
    for module in modules_of(adapters):
        a, b = adapters[f"{PREFIX}{module}{A}"], adapters[f"{PREFIX}{module}{B}"]
        found[f"{module}.weight"] = torch.addmm(weights[f"{module}.weight"], b, a, alpha=scale)
    return found


def modules_of(adapters: Mapping[str, Tensor]) -> list[str]:
    """The modules of adapters by PEFT's names."""
    return [name.removeprefix(PREFIX).removesuffix(A) for name in adapters if name.endswith(A)]
