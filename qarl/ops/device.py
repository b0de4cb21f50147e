"""Where a run computes: on the processor, or on a GPU that torch sees and Triton can make kernels for."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from qarl.errors import ConfigurationError

DeviceChoice = Literal["auto", "cpu", "cuda"]

HOST = torch.device("cpu")
"""Where tensors are laid out from Python's numbers; `with HOST:` makes them there whatever the default device is."""

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, and why it is this one."""

    device: torch.device
    reason: str

    def describe(self) -> str:
        return f"{self.device} ({self.reason})"


def place(choice: DeviceChoice) -> Placement:
    """The device of this choice. ConfigurationError for "cuda" where it cannot be had."""
    if choice == "cpu":
        return Placement(HOST, "as asked")
    missing = missing_for_cuda()
    if missing is None:
        return Placement(torch.device("cuda"), torch.cuda.get_device_name())
    if choice == "cuda":
        raise ConfigurationError(f"device = 'cuda': {missing}; or set device = 'cpu'")
    return Placement(HOST, missing)


def missing_for_cuda() -> str | None:
    """What keeps a run from a GPU, with the remedy; None where nothing does."""
    if not torch.cuda.is_available():
        build = "torch sees no GPU" if torch.version.cuda else "this build of torch knows no GPU"
        return f"{build}: install a CUDA build of torch and the driver, and look at `nvidia-smi`"
    if not has_triton():
        return "a GPU is there, but Triton is not: pip install 'qarl-llm[gpu]'"
    return None


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def moved(record: Record, device: torch.device) -> Record:
    """A copy of a dataclass with its tensors, and those of the dataclasses in it, on the device; itself on the CPU,
    where all of them are made.
    """
    if device.type == "cpu":
        return record
    assert dataclasses.is_dataclass(record) and not isinstance(record, type)
    there = {field.name: _moved_part(getattr(record, field.name), device) for field in dataclasses.fields(record)}
    return dataclasses.replace(record, **there)


def _moved_part(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return moved(value, device) if dataclasses.is_dataclass(value) else value
