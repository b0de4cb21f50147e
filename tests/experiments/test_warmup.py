import json
from pathlib import Path

import torch

from experiments.tasks import CHARACTERS, TASKS, answer_of
from experiments.warmup import IGNORED, batch_of, main, tokenizer
from qarl.models.names import load_model


def test_a_character_is_a_token_and_comes_back() -> None:
    encode = tokenizer()
    ids = encode(CHARACTERS).input_ids
    assert len(ids) == len(CHARACTERS) == len(set(ids)) and encode.decode(ids) == CHARACTERS


def test_only_the_work_and_its_stop_are_learned() -> None:
    encode = tokenizer()
    ids, labels = batch_of(TASKS["addition"], ["1+2\n", "95+17\n"], encode)
    first = encode("1+2\n1+2+0|\n++0|3\n=3").input_ids
    assert ids[0].tolist() == [*first, encode.eos_token_id, *[encode.pad_token_id] * (ids.shape[1] - len(first) - 1)]
    assert (
        labels[0, :4].tolist() == [IGNORED] * 4 and (labels[0, 4 : len(first) + 1] == ids[0, 4 : len(first) + 1]).all()
    )
    assert (labels[0, len(first) + 1 :] == IGNORED).all()


def test_the_command_makes_a_model_and_questions_and_the_same_ones_again(tmp_path: Path) -> None:
    weights = []
    for name in ("one", "other"):
        folder = tmp_path / name
        main(["sorting", "--out", str(folder), "--steps", "2", "--hidden", "32", "--layers", "1", "--batch", "2"])
        model = load_model(str(folder))
        assert model.stop_token_ids == (1,) and model.sampleable == len(CHARACTERS) + 2
        weights.append(model.tensors)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    asked = {row["prompt"] for row in rows}
    held_out = [json.loads(line)["prompt"] for line in (folder / "held-out.jsonl").read_text().splitlines()]
    assert len(rows) == 20000 and len(held_out) == 1000 and not asked.intersection(held_out)
    assert all(row["answer"] == answer_of(TASKS["sorting"].work(row["prompt"])) for row in rows[:50])
