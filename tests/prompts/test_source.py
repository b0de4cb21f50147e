from __future__ import annotations

import random

import pytest

from qarl.errors import ConfigurationError
from qarl.prompts.chat import Renderer
from qarl.prompts.rows import Row
from qarl.prompts.source import PROBED_ROWS, FinitePrompts, GeneratedPrompts, permutation, row_seed, split


class Table:
    """Rows of one word each, but `long` ones of five."""

    def __init__(self, length: int, long: frozenset[int] = frozenset(), name: str = "table") -> None:
        self.name, self._length, self._long = name, length, long

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> Row:
        words = 5 if index in self._long else 1
        return Row(f"{self.name}/{index}", " ".join(["hello"] * words), {"index": index}, f"{self.name}, row {index}")


class Stream:
    name = "stream"

    def __init__(self, longest: int = 1) -> None:
        self._longest = longest
        self.drawn = 0

    def draw(self, seed: int, count: int) -> list[Row]:
        self.drawn += count
        rng = random.Random(seed)
        texts = [" ".join(["hello"] * rng.randint(1, self._longest)) for _ in range(count)]
        return [Row("", text, {"number": rng.random()}, "") for text in texts]


@pytest.fixture
def renderer(make_tokenizer):
    # Three tokens: <s> and at most two words.
    return Renderer(make_tokenizer(), chat=False, max_prompt_tokens=3, on_long="skip")


def indices(prompts):
    return [prompt.row["index"] for prompt in prompts]


def test_an_epoch_holds_every_row_once_and_the_next_is_in_another_order(renderer):
    source = FinitePrompts(Table(12), renderer, seed=5)
    epochs = [[index for step in range(4 * e, 4 * e + 4) for index in indices(source.take(step, 3))] for e in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(12))


def test_a_step_is_the_same_whatever_was_taken_before(renderer):
    steps = [indices(FinitePrompts(Table(10), renderer, seed=1).take(step, 4)) for step in range(6)]
    source = FinitePrompts(Table(10), renderer, seed=1)
    assert [indices(source.take(step, 4)) for step in reversed(range(6))] == steps[::-1]


def test_another_seed_gives_another_order(renderer):
    orders = {tuple(indices(FinitePrompts(Table(10), renderer, seed).take(0, 10))) for seed in range(5)}
    assert len(orders) == 5


def test_long_rows_are_left_out_and_counted(renderer):
    source = FinitePrompts(Table(6, long=frozenset({1, 4})), renderer, seed=0)
    assert sorted(indices(source.take(0, 4))) == [0, 2, 3, 5]
    assert source.skipped == 2


def test_long_row_is_found_at_the_start_when_it_is_an_error(make_tokenizer):
    renderer = Renderer(make_tokenizer(), chat=False, max_prompt_tokens=3)
    with pytest.raises(ConfigurationError, match="table, row 4: prompt table/4 has 6 tokens, the limit is 3"):
        FinitePrompts(Table(6, long=frozenset({4})), renderer, seed=0)


def test_no_row_left_is_refused(renderer):
    with pytest.raises(ConfigurationError, match="no row is left to train on: 2 rows, 0 held out, 2 too long"):
        FinitePrompts(Table(2, long=frozenset({0, 1})), renderer, seed=0)


def test_held_out_share_is_spaced_evenly_and_never_trained_on(renderer):
    source = FinitePrompts(Table(20), renderer, seed=3, held_out_share=0.2)
    held_out = indices(source.held_out(4))
    assert held_out == [2, 7, 12, 17]
    assert set(indices(source.take(0, 16))) == set(range(20)) - set(held_out)
    assert indices(FinitePrompts(Table(20), renderer, seed=4, held_out_share=0.2).held_out(4)) == held_out


def test_held_out_rows_of_their_own(renderer):
    source = FinitePrompts(Table(5), renderer, seed=3, evaluation=Table(3, name="test"))
    assert [prompt.id for prompt in source.held_out(2)] == ["test/0", "test/1"]
    assert sorted(indices(source.take(0, 5))) == [0, 1, 2, 3, 4]


def test_more_held_out_prompts_than_there_are_is_refused(renderer):
    with pytest.raises(
        ConfigurationError, match=r"3 held-out prompts are asked for, 0 are there.*prompts.eval_fraction"
    ):
        FinitePrompts(Table(5), renderer, seed=0).held_out(3)


def test_all_of_finite_data_is_known_before_training_and_some_of_generated(renderer):
    source = FinitePrompts(Table(4, long=frozenset({1})), renderer, seed=0, evaluation=Table(2, name="test"))
    assert [prompt.id for prompt in source.known()] == ["table/0", "table/2", "table/3", "test/0", "test/1"]
    generated = [prompt.row["number"] for prompt in GeneratedPrompts(Stream(), renderer, seed=0).known()]
    assert len(set(generated)) == PROBED_ROWS
    other = [prompt.row["number"] for prompt in GeneratedPrompts(Stream(), renderer, seed=1).known()]
    assert not set(generated) & set(other)
    assert len(list(GeneratedPrompts(Stream(longest=4), renderer, seed=0).known())) < PROBED_ROWS


def test_a_batch_larger_than_the_data_is_refused(renderer):
    source = FinitePrompts(Table(5, long=frozenset({1})), renderer, seed=0)
    assert source.num_training == len(source.take(0, 4)) == 4
    with pytest.raises(ConfigurationError, match="table: 5 prompts at a time are asked for, 4 are there"):
        source.take(0, 5)


def test_prompts_both_trained_on_and_held_out_are_counted_in_one_warning(renderer):
    class Same(Table):
        def row(self, index: int) -> Row:
            row = super().row(index)
            return Row(row.id, "hello" if index % 2 else f"What {index}", row.columns, row.where)

    assert FinitePrompts(Table(5), renderer, seed=0).warnings == ()
    # Rows 1, 3 and 5 of six are equal to row 1 of the two held out, row 0 to row 0; 2 and 4 are to none.
    (warning,) = FinitePrompts(Same(6), renderer, seed=0, evaluation=Same(2, name="test")).warnings
    assert warning.startswith("table: 4 of 6 prompts to train on are also held out, word for word")
    # Of rows 0 to 3 row 2 is held out: none of the others says the same.
    assert FinitePrompts(Same(4), renderer, seed=0, held_out_share=0.25).warnings == ()


def test_what_is_odd_about_a_template_is_a_warning_of_every_source(make_tokenizer):
    renderer = Renderer(make_tokenizer(template="<s> {{ messages[0].content | upper }}"))
    for source in (FinitePrompts(Table(5), renderer, seed=0), GeneratedPrompts(Stream(), renderer, seed=0)):
        assert len(source.warnings) == 1 and "how an answer ends" in source.warnings[0]


def test_a_long_generated_row_is_found_at_the_start(make_tokenizer):
    class Rare(Stream):
        def draw(self, seed: int, count: int) -> list[Row]:
            # One row of fifty has five words.
            return [Row("", "hello " * (5 if (seed + n) % 50 == 0 else 1), {}, "") for n in range(count)]

    renderer = Renderer(make_tokenizer(), chat=False, max_prompt_tokens=3)
    with pytest.raises(
        ConfigurationError, match=r"generated row stream/probe-\d+: .* has 6 tokens, the limit is 3; .*on_long"
    ):
        GeneratedPrompts(Rare(), renderer, seed=0)


def test_the_start_tries_some_hundred_generated_rows_and_takes_no_longer_than_it_may(renderer, monkeypatch):
    stream = Stream()
    GeneratedPrompts(stream, renderer, seed=0)
    assert stream.drawn == PROBED_ROWS
    slow = Stream()
    seconds = iter(range(100))
    monkeypatch.setattr("qarl.prompts.source.time.monotonic", lambda: next(seconds))
    GeneratedPrompts(slow, renderer, seed=0)
    assert slow.drawn == 24  # eight rows a second, and more than two seconds are enough


def test_generated_prompts_are_a_function_of_seed_and_step(renderer):
    def numbers(seed: int, step: int) -> list[float]:
        return [prompt.row["number"] for prompt in GeneratedPrompts(Stream(), renderer, seed).take(step, 3)]

    assert numbers(1, 7) == numbers(1, 7)
    drawn = [number for seed in (1, 2) for step in (7, 8) for number in numbers(seed, step)]
    assert len(set(drawn)) == 12


def test_generated_prompts_are_named_by_step_and_index(renderer):
    source = GeneratedPrompts(Stream(), renderer, seed=0)
    assert [prompt.id for prompt in source.take(4, 2)] == ["stream/4-0", "stream/4-1"]
    assert [prompt.id for prompt in source.held_out(2)] == ["stream/held-out-0", "stream/held-out-1"]


def test_generated_held_out_prompts_do_not_depend_on_the_seed_and_are_none_of_training(renderer):
    first, second = (GeneratedPrompts(Stream(), renderer, seed) for seed in (1, 2))
    held_out = [prompt.row["number"] for prompt in first.held_out(5)]
    assert held_out == [prompt.row["number"] for prompt in second.held_out(5)]
    assert not set(held_out) & {prompt.row["number"] for step in range(20) for prompt in first.take(step, 5)}


def test_long_generated_rows_are_drawn_again_and_counted(renderer):
    source = GeneratedPrompts(Stream(longest=4), renderer, seed=0)
    prompts = source.take(0, 20)
    assert len(prompts) == 20
    assert max(len(prompt.token_ids) for prompt in prompts) == 3
    assert source.skipped > 0
    assert GeneratedPrompts(Stream(longest=4), renderer, seed=0).skipped == 0
    assert len({prompt.id for prompt in prompts}) == 20


def test_stream_that_is_always_too_long_ends_with_an_error(make_tokenizer):
    renderer = Renderer(make_tokenizer(), chat=False, max_prompt_tokens=1, on_long="skip")
    with pytest.raises(ConfigurationError, match="200 rows were drawn and only 0 of 2 prompts are short enough"):
        GeneratedPrompts(Stream(), renderer, seed=0).take(0, 2)


def test_seeds_of_training_and_held_out_rows_lie_in_different_halves():
    for key in map(str, range(200)):
        assert 0 <= row_seed(key, 1000, held_out=False) <= 2**31 - 1000
        assert 2**31 <= row_seed(key, 1000, held_out=True) <= 2**32 - 1000


def test_split_rounds_to_whole_rows():
    assert split(3, 0.0) == ([0, 1, 2], [])
    assert split(4, 0.5) == ([0, 2], [1, 3])
    assert split(3, 0.3) == ([0, 2], [1])


def test_permutation_holds_every_index():
    assert sorted(permutation(50, 3, 2)) == list(range(50))
    assert permutation(50, 3, 2) != permutation(50, 3, 3)
