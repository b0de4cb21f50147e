"""Messages to token ids and back: the only user of the tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import jinja2
import jinja2.meta

from qarl.errors import ConfigurationError, suggestion
from qarl.prompts.rows import Content, Message, Row, checked_text
from qarl.records import Prompt

_SET_BY_RENDERER = frozenset(["messages", "add_generation_prompt", "continue_final_message", "tokenize"])
"""Names in a chat template that are not the user's to set."""

_PROVIDED = frozenset(["raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace"])
"""Functions that chat templates call."""

_SHOWN_IDS = 5
"""Token ids shown of either end of a prompt."""


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that is used."""

    @property
    def chat_template(self) -> Any: ...

    @property
    def bos_token(self) -> str | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


class Renderer:
    """Rows to prompts, by the tokenizer's chat template or as plain text.

    `system` is put before every prompt; a row with a system message of its own is then refused. `chat` "auto" means
    the chat template if the tokenizer has one. A prompt of more than `max_prompt_tokens` is an error, or with
    `on_long` "skip" rendered to None. `template_args` go to the template (`{"enable_thinking": False}`); one that it
    does not read is an error.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system: str | None = None,
        chat: bool | Literal["auto"] = "auto",
        max_prompt_tokens: int = 1024,
        on_long: Literal["error", "skip"] = "error",
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        if chat is True and not tokenizer.chat_template:
            raise ConfigurationError(
                'prompts.chat is true, but the tokenizer has no chat template; set prompts.chat to "auto" or false, or '
                "take a model with one"
            )
        self.chat = bool(tokenizer.chat_template) if chat == "auto" else chat
        self._tokenizer = tokenizer
        self._system = system if system is None else checked_text(system, "prompts.system")
        self._max_prompt_tokens = max_prompt_tokens
        self._on_long = on_long
        self._template_args = dict(template_args or {})
        self._writes_date: bool | None = None
        self._turn_end: int | None = None
        self._no_turn_end = ""
        if self.chat:
            check_template_args(tokenizer, self._template_args)
            self._turn_end, self._no_turn_end = self._end_of_turn()
        elif self._template_args:
            raise ConfigurationError(
                f"prompts.template_args = {self._template_args}: prompts are rendered as plain text, which no template "
                "argument changes; remove it, or take a model with a chat template and set prompts.chat = true"
            )

    def render(self, row: Row) -> Prompt | None:
        """The prompt of a row, or None when it is too long and such prompts are skipped."""
        messages = self._messages(row)
        text = self._chat_text(messages, row.where) if self.chat else self._plain_text(messages, row)
        token_ids = self._encode(text)
        if not token_ids:
            raise ConfigurationError(f"{row.where}: the prompt {row.id} has no tokens; remove the row or fill it in")
        if len(token_ids) > self._max_prompt_tokens:
            if self._on_long == "skip":
                return None
            raise ConfigurationError(
                f"{row.where}: prompt {row.id} has {len(token_ids)} tokens, the limit is {self._max_prompt_tokens}; "
                'raise prompts.max_prompt_tokens, or set prompts.on_long = "skip" to leave such rows out'
            )
        return Prompt(row.id, tuple(token_ids), text, row.columns)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens; for rewards and people, never to be encoded again."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end token, and in a chat also the special token with which the template ends the assistant's turn."""
        ids = [end for end in (self._tokenizer.eos_token_id, self._turn_end) if end is not None]
        if not ids:
            raise ConfigurationError(
                "the tokenizer names no end token (eos_token), so no completion could ever end by itself; "
                "set eos_token in its tokenizer_config.json"
            )
        return tuple(dict.fromkeys(ids))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd about the chat template; known when a prompt was rendered."""
        found = []
        if self._no_turn_end:
            found.append(
                f"the chat template does not show how an answer ends ({self._no_turn_end}): completions end only at "
                "the model's own end tokens"
            )
        if self._writes_date:
            found.append(
                "the chat template writes today's date, so that prompts change from day to day and a run cannot be "
                "resumed on another one; set prompts.template_args or prompts.system such that it does not"
            )
        return tuple(found)

    def _messages(self, row: Row) -> list[Message]:
        content: Content = row.content
        messages = [Message(role="user", content=content)] if isinstance(content, str) else list(content)
        if messages[-1]["role"] == "assistant":
            raise ConfigurationError(
                f"{row.where}: the last message is the assistant's; a prompt ends with what is to be answered"
            )
        if self._system is None:
            return messages
        if any(message["role"] == "system" for message in messages):
            raise ConfigurationError(
                f"{row.where}: the row has a system message of its own; leave prompts.system out or remove it there"
            )
        return [Message(role="system", content=self._system), *messages]

    def _chat_text(self, messages: list[Message], where: str) -> str:
        settings = {"tokenize": False, "add_generation_prompt": True, **self._template_args}
        try:
            text = str(self._tokenizer.apply_chat_template(messages, **settings))
        # Templates are programs of the model's authors: they raise what they like, jinja2's errors among others.
        except Exception as error:
            raise ConfigurationError(
                f"{where}: the chat template refuses these messages ({_one_line(error)}); change the row, "
                "prompts.system or prompts.template_args"
            ) from error
        if self._writes_date is None:
            # Functions of ours are not let into a template; one that calls a text in place of its own clock fails.
            try:
                self._tokenizer.apply_chat_template(messages, **settings, strftime_now="not to be called")
                self._writes_date = False
            except TypeError:
                self._writes_date = True
        return text

    def _plain_text(self, messages: list[Message], row: Row) -> str:
        if any(message["role"] not in ("system", "user") for message in messages):
            raise ConfigurationError(
                f"{row.where}: a conversation with several speakers needs a chat template; set prompts.chat = true "
                "with a model that has one"
            )
        return "\n\n".join(message["content"] for message in messages)

    def _encode(self, text: str) -> list[int]:
        # A chat template writes its special tokens itself; a plain text gets the model's, unless it brings them.
        bos, end = self._tokenizer.bos_token, self._tokenizer.eos_token_id
        bare = self._tokenizer.encode(text, add_special_tokens=False)
        if self.chat or not bare or (bos is not None and text.startswith(bos)):
            return bare
        ids = self._tokenizer.encode(text, add_special_tokens=True)
        # Some tokenizers also put the end token behind a text; nothing follows an end.
        return ids[:-1] if ids[-1] == end != bare[-1] else ids

    def _end_of_turn(self) -> tuple[int | None, str]:
        """The special token that the template writes behind an answer; or None, and why there is none."""
        marker = "qarl-end-of-turn"
        turn = [Message(role="user", content="?"), Message(role="assistant", content=marker)]
        try:
            text = str(self._tokenizer.apply_chat_template(turn, tokenize=False, **self._template_args))
        # As in `_chat_text`: a template for prompts alone refuses an answer with whatever error it likes.
        except Exception as error:
            return None, _one_line(error)
        _, found, tail = text.rpartition(marker)
        if not found:
            return None, "it changes what the assistant says"
        special = {id for id, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        special.update(self._tokenizer.all_special_ids)
        ends = [id for id in self._tokenizer.encode(tail, add_special_tokens=False) if id in special]
        return (ends[0], "") if ends else (None, "no special token follows one")


def check_template_args(tokenizer: Tokenizer, template_args: Mapping[str, Any]) -> None:
    """ConfigurationError for an argument that the chat template does not read or that is not the user's to set."""
    free = template_variables(tokenizer, template_args) - _SET_BY_RENDERER - _PROVIDED
    for name in template_args:
        where = f"prompts.template_args.{name}"
        if name in _SET_BY_RENDERER:
            raise ConfigurationError(f"{where}: is set by qarl itself; remove it")
        if name not in free:
            raise ConfigurationError(
                f"{where}: the chat template does not read it; it reads {', '.join(sorted(free)) or 'no arguments'}"
                f"{suggestion(name, free)}; correct or remove it"
            )


def template_variables(tokenizer: Tokenizer, template_args: Mapping[str, Any]) -> set[str]:
    """Names that the chat template reads and does not set; ConfigurationError when it is no template."""
    try:
        template = tokenizer.get_chat_template(tools=template_args.get("tools"))
        # The tag with which some templates mark what the assistant said is an extension of transformers.
        plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        return jinja2.meta.find_undeclared_variables(environment.parse(plain))
    except (jinja2.TemplateError, ValueError) as error:
        raise ConfigurationError(
            f"the tokenizer's chat template cannot be used ({_one_line(error)}); correct "
            "chat_template in its tokenizer_config.json, or set prompts.chat = false"
        ) from error


def describe_prompt(prompt: Prompt) -> str:
    """A prompt as the model sees it, for people: how many tokens, the ids at both ends, and the text."""
    ids = [str(id) for id in prompt.token_ids]
    shown = ids if len(ids) <= 2 * _SHOWN_IDS else [*ids[:_SHOWN_IDS], "...", *ids[-_SHOWN_IDS:]]
    lines = (f"  | {line}" for line in prompt.text.splitlines())
    return "\n".join([f"{len(ids)} tokens, {' '.join(shown)}:", *lines])


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
