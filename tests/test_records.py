"""The nouns: frozen, told apart by identity where they hold tensors, and never sharing a default."""

import dataclasses
import inspect

import pytest
import torch

from qarl import records
from qarl.records import Completion, Group, GroupRewards, LossInputs, Prompt, Sampling

NOUNS = [kind for _, kind in inspect.getmembers(records, dataclasses.is_dataclass)]


def completion() -> Completion:
    return Completion(torch.tensor([5, 6, 2]), torch.zeros(3), torch.zeros(3, dtype=torch.int64), "stop", "hi")


def test_a_completion_is_as_long_as_its_tokens() -> None:
    assert len(completion()) == 3


@pytest.mark.parametrize("kind", NOUNS, ids=lambda kind: kind.__name__)
def test_what_rooms_hand_over_cannot_be_changed(kind: type) -> None:
    blank = object.__new__(kind)
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(blank, field.name, None)


def test_records_with_tensors_are_equal_to_themselves_only() -> None:
    # Comparing their tensors would be elementwise, and no key of a dictionary.
    one, same = completion(), completion()
    assert one == one and one != same
    assert len({one, same}) == 2
    prompt = Prompt("p/0", (1,), "", {})
    assert Group(prompt, (one,)) != Group(prompt, (one,))


def test_samplings_are_equal_by_value() -> None:
    assert Sampling(0.5, 8, (2,)) == Sampling(0.5, 8, (2,)) != Sampling(0.5, 8, ())


def test_rewards_without_terms_share_nothing() -> None:
    one, other = GroupRewards(torch.zeros(2)), GroupRewards(torch.zeros(2))
    assert one.terms == {} and one.errors == ()
    assert one.terms is not other.terms


def test_what_an_objective_does_not_ask_for_is_absent() -> None:
    given = torch.zeros(1, 2)
    inputs = LossInputs(given, given, given, torch.zeros(1), torch.ones(1, 2, dtype=torch.bool), 1, 2, 8)
    assert (inputs.entropy_BT, inputs.reference_BT, inputs.tokens_BT) == (None, None, None)
