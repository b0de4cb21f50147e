"""Tokenizers: from a folder, from a GGUF file, or made on the spot; which tokens may be sampled and which stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qarl.errors import ConfigurationError
from qarl.models.load import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_OF_TURN = "<|im_end|>"


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or a GGUF file; code that comes with a model is never run.

    Raises ConfigurationError when there is none, or it needs such code.
    """
    from transformers import AutoTokenizer

    gguf_file = path.name if path.is_file() else None
    folder = path.parent if path.is_file() else path
    try:
        with _quiet_transformers():
            return AutoTokenizer.from_pretrained(
                folder, gguf_file=gguf_file, local_files_only=True, trust_remote_code=False
            )
    # Of a damaged file the libraries make whatever it leads to; the one in Rust has no exceptions of its own.
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigurationError(f"{path}: no usable tokenizer: {reason}") from error


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """259 tokens: 0 to 255 are the bytes, then <|endoftext|> (padding), <|im_start|> and <|im_end|> (stop)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_byte_symbols())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", END_OF_TURN]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_TURN, pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def sampleable_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """How many tokens, from 0 on, may be sampled: rows that only pad the model's vocabulary have no text."""
    return min(max(tokenizer.get_vocab().values(), default=-1) + 1, vocab_size)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int, also: Iterable[int] = ()) -> tuple[int, ...]:
    """The tokens that end an answer, ascending: the tokenizer's end token, `<|im_end|>` where it exists, and `also`."""
    stops = set(also)
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    if END_OF_TURN in (vocabulary := tokenizer.get_vocab()):
        stops.add(vocabulary[END_OF_TURN])
    return tuple(sorted(stop for stop in stops if stop < sampleable_tokens(tokenizer, vocab_size)))


def declared_stop_ids(folder: Path) -> set[int]:
    """`eos_token_id` of a folder's generation_config.json and config.json, each a number, a list or absent."""
    stops: set[int] = set()
    for file in (folder / "generation_config.json", folder / "config.json"):
        declared = read_json(file).get("eos_token_id") if file.is_file() else None
        listed = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if wrong := [stop for stop in listed if isinstance(stop, bool) or not isinstance(stop, int)]:
            raise ConfigurationError(f"{file}: eos_token_id must be token numbers, not {wrong[0]!r}")
        stops.update(listed)
    return stops


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free character from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    replaced = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + replaced.index(byte)) for byte in range(256)]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Errors only, and no progress bars: its notices concern its own model classes, which are not used here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
