"""What a user chooses about several processes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from qarl.cluster.config import ClusterConfig


def test_ranks_wait_ten_minutes_and_not_for_nothing_or_ever() -> None:
    assert ClusterConfig().timeout_s == 600.0
    for wrong in (0.5, 1e9):
        with pytest.raises(ValidationError):
            ClusterConfig(timeout_s=wrong)
