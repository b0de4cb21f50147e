import pytest

from qarl.records import Prompt
from qarl.rollout.cache import Region
from qarl.rollout.request import Request, SharedPrompt, spans_of


def make_request(prompt_length: int = 5) -> Request:
    return Request(SharedPrompt(Prompt("p", tuple(range(prompt_length)), "", {}), waiting=1), index=0, stream=0)


def test_a_stop_token_ends_a_request_and_is_its_last_token():
    request = make_request()
    request.take(9, -0.5, stop_token_ids=(7, 8), max_new_tokens=4)
    assert not request.finish_reason
    request.take(8, -0.25, stop_token_ids=(7, 8), max_new_tokens=4)
    assert (request.token_ids, request.logprobs) == ([9, 8], [-0.5, -0.25])
    assert str(request.finish_reason) == "stop"


@pytest.mark.parametrize(("last", "reason"), [(9, "length"), (8, "stop")])
def test_the_limit_ends_a_request_but_a_stop_token_in_the_last_place_is_a_stop(last: int, reason: str):
    request = make_request()
    for token in (9, 9, last):
        assert request.finish_reason is None
        request.take(token, -1.0, stop_token_ids=(8,), max_new_tokens=3)
    assert request.finish_reason == reason


def test_the_next_position_counts_what_is_stored_of_prompt_and_completion():
    request = make_request(prompt_length=5)
    request.shared.region = Region([7])
    assert (request.shared.next_position, request.shared.to_prefill()) == (0, (0, 1, 2, 3, 4))
    assert request.shared.region.next_rows(3) == [224, 225, 226]
    assert (request.shared.next_position, request.shared.to_prefill()) == (3, (3, 4))
    request.shared.region.next_rows(2)
    assert (request.shared.next_position, request.shared.to_prefill()) == (5, ())
    assert (request.next_position, request.to_prefill()) == (5, [])


def test_of_the_tokens_a_request_came_with_the_newest_is_left_for_decoding():
    request = make_request(prompt_length=5)
    request.token_ids = [9, 8, 7]
    request.shared.region, request.region = Region([7], length=5), Region([2])
    assert (request.next_position, request.to_prefill()) == (5, [9, 8])
    request.region.next_rows(1)
    assert (request.next_position, request.to_prefill()) == (6, [8])
    assert request.spans() == [(224, 5), (64, 1)]
    request.region.next_rows(1)
    assert (request.next_position, request.to_prefill()) == (7, [])


def test_the_layout_of_a_forward_worked_by_hand():
    # Sequence 0: a chunk of two queries over one span; sequence 1: a decoded token over a prompt's and its own span.
    spans = spans_of([[(64, 9)], [(0, 5), (32, 2)]], [[8, 9], [7]])
    assert spans.sequences.tolist() == [0, 0, 1]
    assert spans.visible.tolist() == [8, 9, 7]
    assert spans.pointers.tolist() == [0, 1, 3]
    assert spans.starts.tolist() == [64, 0, 32]
    assert spans.lengths.tolist() == [9, 5, 2]
    assert spans.families.tolist() == [0, 3]
    assert spans.longest == 9
