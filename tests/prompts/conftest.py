"""A word-level tokenizer with a chat template, made on the spot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>"]
WORDS = ["What", "is", "?", "+", "-", "*", "Answer", "briefly", "hello", *map(str, range(100))]


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """A tokenizer that writes <s> before a text when asked for special tokens, as Llama's does, or as `frame` says."""

    def make(template: object = TEMPLATE, eos: str | None = "</s>", frame: str = "<s> $A") -> PreTrainedTokenizerFast:
        vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
        core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        core.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[("<s>", 1), ("</s>", 2)])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token=eos, unk_token="<unk>",
            additional_special_tokens=SPECIAL[3:],
        )  # fmt: skip
        tokenizer.chat_template = template
        return tokenizer

    return make
