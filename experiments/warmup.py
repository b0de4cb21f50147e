"""Train the small model of a test bed from nothing: it learns to write the work of a task, not yet to be right.

    python -m experiments.warmup addition --out runs/beds/addition

makes a model folder of 0.9 million parameters, and `train.jsonl` and `held-out.jsonl` with questions for the runs, on
one thread in ten minutes to half an hour. The same command on the same machine makes the same files.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.tasks import CHARACTERS, TASKS, Task, answer_of

PAD, STOP = "<pad>", "<stop>"
IGNORED = -100
STEPS = {"addition": 1400, "sorting": 700}
"""After which a model writes the form of the work without fail, and makes mistakes in it."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: index for index, token in enumerate([PAD, STOP, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=STOP, clean_up_tokenization_spaces=False
    )


def model(vocabulary: int, hidden: int, layers: int, context: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def batch_of(task: Task, questions: list[str], encode: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids and labels [B, T]; the question and the padding are not learned."""
    prompts = [encode(question).input_ids for question in questions]
    works = [[*encode(task.work(question)).input_ids, encode.eos_token_id] for question in questions]
    length = max(len(prompt) + len(work) for prompt, work in zip(prompts, works, strict=True))
    ids = torch.full((len(questions), length), encode.pad_token_id)
    labels = torch.full((len(questions), length), IGNORED)
    for row, (prompt, work) in enumerate(zip(prompts, works, strict=True)):
        ids[row, : len(prompt) + len(work)] = torch.tensor(prompt + work)
        labels[row, len(prompt) : len(prompt) + len(work)] = torch.tensor(work)
    return ids, labels


def train(
    net: LlamaForCausalLM,
    encode: PreTrainedTokenizerFast,
    task: Task,
    sizes: tuple[int, int],
    random: Random,
    steps: int,
    batch: int,
    lr: float,
) -> None:
    """Cross entropy on freshly drawn questions; AdamW, warm-up over 100 steps, then a cosine down to a tenth."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)

    def factor(step: int) -> float:
        cosine = 0.55 + 0.45 * float(torch.cos(torch.tensor(step / steps * torch.pi)))
        return min((step + 1) / 100, 1.0) * cosine

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    start = time.perf_counter()
    for step in range(steps):
        ids, labels = batch_of(task, [task.draw(random, sizes) for _ in range(batch)], encode)
        output = net(input_ids=ids, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            learned = labels != IGNORED
            right = (output.logits[:, :-1].argmax(-1) == labels[:, 1:])[learned[:, 1:]].float().mean()
            print(
                f"step {step + 1}/{steps}: loss {float(output.loss):.4f}, next character right {float(right):.4f}, "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )


def write_questions(file: Path, task: Task, sizes: tuple[int, int], random: Random, count: int) -> None:
    questions = (task.draw(random, sizes) for _ in range(count))
    lines = (json.dumps({"prompt": one, "answer": answer_of(task.work(one))}) + "\n" for one in questions)
    file.write_text("".join(lines), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs=2, default=(6, 10))
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, help="by default as many as this task's bed takes")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    task, sizes, encode = TASKS[given.task], tuple(given.sizes), tokenizer()
    net = model(len(encode), given.hidden, given.layers, context=1024)
    train(net, encode, task, sizes, Random(given.seed), given.steps or STEPS[given.task], given.batch, given.lr)
    given.out.mkdir(parents=True, exist_ok=True)
    net.save_pretrained(given.out)
    encode.save_pretrained(given.out)
    write_questions(given.out / "train.jsonl", task, sizes, Random(given.seed + 1), 20000)
    write_questions(given.out / "held-out.jsonl", task, sizes, Random(given.seed + 2), 1000)


if __name__ == "__main__":
    main()
