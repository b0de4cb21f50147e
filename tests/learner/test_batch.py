import math

import pytest
import torch

from qarl.errors import RunError
from qarl.learner.batch import Sample, Share, divide, idle, micro_batches, pack, shares_of, split_evenly
from qarl.records import Completion, Group, Prompt


def completion(*tokens: int) -> Completion:
    """Token 7 was sampled with log-probability -0.7."""
    ids = torch.tensor(tokens, dtype=torch.int64)
    return Completion(ids, -ids.float() / 10, torch.zeros_like(ids), "stop", "")


def prompt(*tokens: int) -> Prompt:
    return Prompt("-".join(map(str, tokens)), tokens, "", {})


def share(prompt_length: int, *lengths: int) -> Share:
    """A prompt and completions of these lengths; the advantage is the length."""
    samples = tuple(Sample(completion(*range(length)), float(length)) for length in lengths)
    return Share(prompt(*range(prompt_length)), samples)


GROUPS = [
    Group(prompt(10, 11, 12), (completion(20, 21, 22), completion(23, 24))),
    Group(prompt(30, 31), (completion(40), completion(41, 42))),
]
ADVANTAGES = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])]


def test_two_groups_packed_by_hand():
    micro = pack(shares_of(GROUPS, ADVANTAGES))
    # rows:                               0   1   2   3   4   5   6   7   8
    assert micro.token_ids_T.tolist() == [10, 11, 12, 20, 21, 23, 30, 31, 41]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2]
    assert micro.longest == 5
    # Each completion is predicted from its prompt's last row and its own rows but the last token's.
    assert micro.scored_rows_S.tolist() == [2, 3, 4, 2, 5, 7, 7, 8]
    assert micro.targets_S.tolist() == [20, 21, 22, 23, 24, 40, 41, 42]
    assert micro.sequence_S.tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert micro.time_S.tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert micro.advantages_B.tolist() == [1.0, -2.0, 0.5, 3.0]
    assert micro.mask_BL.tolist() == [[True] * 3, [True, True, False], [True, False, False], [True, True, False]]
    assert micro.tokens_BL.tolist() == [[20, 21, 22], [23, 24, 0], [40, 0, 0], [41, 42, 0]]
    assert torch.equal(micro.engine_BL, -micro.tokens_BL.float() / 10)


def test_the_spans_of_two_groups_by_hand():
    spans = pack(shares_of(GROUPS, ADVANTAGES)).spans
    # Runs: prompt 1, its completions A and B, prompt 2, its completion D (C has one token, which is no input).
    assert spans.sequences.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4]
    assert spans.visible.tolist() == [1, 2, 3, 4, 5, 4, 1, 2, 3]
    assert spans.pointers.tolist() == [0, 1, 3, 5, 6, 8]
    pairs = list(zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True))
    assert pairs == [(0, 3), (0, 3), (3, 2), (0, 3), (5, 1), (6, 2), (6, 2), (8, 1)]
    assert spans.families.tolist() == [0, 6, 9]
    assert spans.longest == 5


def test_the_frame_puts_scored_tokens_in_their_places_and_zero_elsewhere():
    micro = pack(shares_of(GROUPS, ADVANTAGES))
    scored = torch.arange(1.0, 9.0, requires_grad=True)
    framed = micro.frame(scored)
    assert framed.tolist() == [[1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 8, 0]]
    assert torch.equal(framed[micro.mask_BL], scored)
    (framed * torch.tensor([[1.0], [2.0], [3.0], [4.0]])).sum().backward()
    assert scored.grad is not None
    assert scored.grad.tolist() == [1, 1, 1, 2, 2, 3, 4, 4]


def test_completions_without_an_advantage_or_without_tokens_are_left_out():
    groups = [Group(prompt(1), (completion(5), completion(6), completion())), Group(prompt(2), (completion(7),))]
    [kept] = shares_of(groups, [torch.tensor([math.nan, 2.0, 1.0]), torch.tensor([math.nan])])
    assert kept.prompt is groups[0].prompt
    assert [sample.completion for sample in kept.samples] == [groups[0].completions[1]]
    assert kept.samples[0].advantage == 2.0


def test_an_advantage_for_every_completion_is_required():
    with pytest.raises(RunError, match=r"prompt 30-31: 2 completions but 1 advantages"):
        shares_of(GROUPS, [ADVANTAGES[0], torch.tensor([1.0])])


@pytest.mark.parametrize(
    ("count", "parts", "sizes"), [(6, 2, [3, 3]), (7, 3, [2, 2, 3]), (2, 4, [1, 1]), (5, 1, [5]), (0, 3, [])]
)
def test_prompts_are_split_in_order_and_nearly_evenly(count: int, parts: int, sizes: list[int]):
    shares = [share(1, 1) for _ in range(count)]
    split = split_evenly(shares, parts)
    assert [len(part) for part in split] == sizes
    assert [one for part in split for one in part] == shares


def packed_tokens(shares: list[Share], budget: int) -> list[int]:
    return [len(micro.token_ids_T) for micro in micro_batches(shares, budget)]


def test_micro_batches_fill_up_to_the_budget_and_not_past_it():
    shares = [share(4, 4, 4), share(3, 2)]  # 4 + 3 + 3 = 10 rows, then 3 + 1 = 4
    assert packed_tokens(shares, 14) == [14]
    assert packed_tokens(shares, 13) == [10, 4]
    # The second completion takes its prompt along: 4 + 3, then 4 + 3 and 3 + 1 do not fit together in 9.
    assert packed_tokens(shares, 9) == [7, 7, 4]
    assert packed_tokens(shares, 11) == [10, 4]
    assert packed_tokens([share(4, 4, 4, 4), share(3, 2)], 11) == [10, 11]


def test_a_divided_group_keeps_its_order_and_its_prompt_in_every_part():
    micros = micro_batches([share(4, 5, 6, 7)], 13)
    assert [micro.advantages_B.tolist() for micro in micros] == [[5.0, 6.0], [7.0]]
    for micro in micros:
        assert micro.token_ids_T[:4].tolist() == [0, 1, 2, 3]
        assert int(micro.scored_rows_S.max()) < len(micro.token_ids_T)
    assert micros[1].scored_rows_S.tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_a_completion_longer_than_the_budget_goes_alone():
    assert packed_tokens([share(3, 2), share(3, 50), share(3, 2)], 10) == [4, 52, 4]
    assert packed_tokens([share(3, 50)], 10) == [52]


def test_no_completion_is_lost_or_doubled_whatever_the_budget():
    shares = [share(3, 1, 2, 3), share(5, 9), share(1, 1), share(2, 4, 4)]
    expected = [1.0, 2.0, 3.0, 9.0, 1.0, 4.0, 4.0]
    for budget in range(1, 40):
        micros = micro_batches(shares, budget)
        assert torch.cat([micro.advantages_B for micro in micros]).tolist() == expected
        for micro in micros:
            assert len(micro.token_ids_T) <= budget or len(micro.advantages_B) == 1


def test_a_prompt_whose_completions_all_have_one_token():
    micro = pack([share(3, 1, 1)])
    assert micro.token_ids_T.tolist() == [0, 1, 2]
    assert micro.scored_rows_S.tolist() == [2, 2]
    assert micro.spans.pointers.tolist() == [0, 1]
    assert micro.mask_BL.tolist() == [[True], [True]]
    assert micro.longest == 3


def test_nothing_to_train_is_no_micro_batch():
    assert micro_batches([], 100) == []


def lengths(parts: list[list[Share]]) -> list[list[tuple[int, ...]]]:
    return [[tuple(len(sample.completion) for sample in one.samples) for one in part] for part in parts]


def test_ranks_get_neighbours_of_nearly_equal_cost():
    # Packed tokens: 4 + 9, 9, 9 of the first group, 4 + 9 of the second: 44 in all.
    shares = [share(4, 10, 10, 10), share(4, 10)]
    assert lengths(divide(shares, 2)) == [[(10, 10)], [(10,), (10,)]]
    assert lengths(divide(shares, 4)) == [[(10,)], [(10,)], [(10,)], [(10,)]]
    assert lengths(divide(shares, 1)) == [[(10, 10, 10), (10,)]]


def test_of_few_completions_some_ranks_get_none():
    parts = divide([share(3, 5)], 3)
    assert lengths(parts) == [[], [(5,)], []]
    assert divide([], 2) == [[], []]


def test_two_groups_of_one_prompt_stay_two():
    groups = [share(2, 3), share(2, 3)]
    assert lengths(divide(groups, 1)) == [[(3,), (3,)]]
    assert [len(part) for part in divide([*groups, *groups], 2)] == [2, 2]


def test_the_idle_micro_batch_scores_one_token():
    micro = idle()
    assert (len(micro.token_ids_T), len(micro.targets_S), micro.advantages_B.tolist()) == (1, 1, [0.0])
