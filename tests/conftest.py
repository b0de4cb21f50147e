"""What every test starts from: one thread, fixed seeds, no network."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

# Before any tokenizer or hub library is imported: tests read nothing from a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seeds() -> Iterator[None]:
    """Small tensors are quicker on one thread; a test that wants more sets them, and the next one starts afresh."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    yield
    torch.set_num_threads(1)
