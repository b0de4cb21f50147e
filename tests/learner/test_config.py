import pytest
from pydantic import ValidationError

from qarl.learner.config import LearnerConfig
from qarl.optim import AdamW, Constant


def test_defaults_train_each_batch_once_with_adamw_at_a_constant_rate():
    config = LearnerConfig()
    assert config.updates_per_batch == 1
    assert config.optimizer == AdamW()
    assert config.schedule == Constant()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": float("inf")},
        {"updates_per_batch": 0},
        {"micro_batch_tokens": 0},
        {"head_chunk_tokens": 0},
        {"max_grad_norm": 0.0},
        {"max_skipped_updates": -1},
        {"learning_rate": 1e-6},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_the_keys_name(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        LearnerConfig.model_validate(wrong)


def test_every_field_is_described():
    assert [name for name, field in LearnerConfig.model_fields.items() if not field.description] == []
