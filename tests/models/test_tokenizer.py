import json

import pytest
from transformers import AutoTokenizer
from transformers.utils import logging

from qarl.errors import ConfigurationError
from qarl.models.tokenizer import byte_tokenizer, declared_stop_ids, load_tokenizer, sampleable_tokens, stop_token_ids


def test_byte_tokens_are_the_bytes_themselves():
    tokenizer = byte_tokenizer()
    every_byte = bytes(range(32, 127)).decode() + "\n\té€😀\x00"
    ids = tokenizer(every_byte)["input_ids"]
    assert ids == list(every_byte.encode())
    assert tokenizer.decode(ids) == every_byte
    assert all(tokenizer.convert_ids_to_tokens(byte) is not None for byte in range(256))


def test_the_byte_tokenizer_renders_a_chat():
    rendered = byte_tokenizer().apply_chat_template(
        [{"role": "user", "content": "2 + 2"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"


def test_rows_that_only_pad_the_vocabulary_are_not_sampleable():
    tokenizer = byte_tokenizer()
    assert sampleable_tokens(tokenizer, 320) == 259
    assert sampleable_tokens(tokenizer, 200) == 200


def test_stop_tokens_are_the_end_token_the_end_of_turn_and_the_declared_ones():
    tokenizer = byte_tokenizer()
    assert stop_token_ids(tokenizer, 320) == (258,)
    assert stop_token_ids(tokenizer, 320, also={10, 256}) == (10, 256, 258)
    tokenizer.eos_token = "<|endoftext|>"
    assert stop_token_ids(tokenizer, 320) == (256, 258)
    # A stop token that cannot be sampled is none.
    assert stop_token_ids(tokenizer, 258) == (256,)


def test_declared_stop_tokens_come_from_both_configs(tmp_path):
    assert declared_stop_ids(tmp_path) == set()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert declared_stop_ids(tmp_path) == {3, 5, 7}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ConfigurationError, match="eos_token_id must be token numbers"):
        declared_stop_ids(tmp_path)


def test_a_saved_tokenizer_loads_without_a_word(tmp_path, capfd):
    byte_tokenizer().save_pretrained(tmp_path)
    capfd.readouterr()
    assert load_tokenizer(tmp_path)("ab")["input_ids"] == [97, 98]
    assert capfd.readouterr() == ("", "")


def test_notices_of_transformers_are_silenced_while_loading_and_only_then(tmp_path, monkeypatch, caplog):
    def noisy(*args, **kwargs):
        logging.get_logger("transformers.models").warning("a notice")
        return byte_tokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", noisy)
    before = logging.get_verbosity()
    load_tokenizer(tmp_path)
    assert "a notice" not in caplog.text
    assert logging.get_verbosity() == before
    noisy()
    assert "a notice" in caplog.text


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigurationError, match="no usable tokenizer") as raised:
        load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("declared", [{"a": 1}, [[1]], [1, "</s>"], True, 1.5])
def test_stop_tokens_that_are_no_numbers_are_refused_with_their_file(tmp_path, declared):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    with pytest.raises(ConfigurationError, match=r"generation_config\.json: eos_token_id must be token numbers"):
        declared_stop_ids(tmp_path)


def test_whatever_the_libraries_raise_is_one_line(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("data did not match\nany variant")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", broken)
    with pytest.raises(ConfigurationError, match=r"no usable tokenizer: data did not match$"):
        load_tokenizer(tmp_path)


def test_of_a_tokenizer_without_tokens_none_is_sampleable():
    class Empty:
        def get_vocab(self):
            return {}

    assert sampleable_tokens(Empty(), 320) == 0
