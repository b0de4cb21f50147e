"""Messages to token ids and back: the only user of the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from qarl.errors import ConfigurationError
from qarl.prompts.rows import Content, Message, Row
from qarl.records import Prompt


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

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


class Renderer:
    """Rows to prompts, by the tokenizer's chat template or as plain text.

    `system` is put before every prompt; a row with a system message of its own is then refused. `chat` "auto" means
    the chat template if the tokenizer has one. A prompt of more than `max_prompt_tokens` is an error, or with
    `on_long` "skip" rendered to None. `template_args` go to the template (`{"enable_thinking": False}`).
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
        self._system = system
        self._max_prompt_tokens = max_prompt_tokens
        self._on_long = on_long
        self._template_args = dict(template_args or {})

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
        end = self._tokenizer.eos_token_id
        ids = ([] if end is None else [end]) + (self._turn_end() if self.chat else [])
        if not ids:
            raise ConfigurationError(
                "the tokenizer names no end token (eos_token), so no completion could ever end by itself; "
                "set eos_token in its tokenizer_config.json"
            )
        return tuple(dict.fromkeys(ids))

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
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self._template_args
                )
            )
        # Templates are programs of the model's authors: they raise what they like, jinja2's errors among others.
        except Exception as error:
            raise ConfigurationError(
                f"{where}: the chat template refuses these messages ({type(error).__name__}: {error}); change the row, "
                "prompts.system or prompts.template_args"
            ) from error

    def _plain_text(self, messages: list[Message], row: Row) -> str:
        if any(message["role"] not in ("system", "user") for message in messages):
            raise ConfigurationError(
                f"{row.where}: a conversation with several speakers needs a chat template; set prompts.chat = true "
                "with a model that has one"
            )
        return "\n\n".join(message["content"] for message in messages)

    def _encode(self, text: str) -> list[int]:
        # A chat template writes its special tokens itself; a plain text gets the model's, unless it brings them.
        bos = self._tokenizer.bos_token
        complete = self.chat or (bos is not None and text.startswith(bos))
        return self._tokenizer.encode(text, add_special_tokens=not complete)

    def _turn_end(self) -> list[int]:
        marker = "qarl-end-of-turn"
        turn = [Message(role="user", content="?"), Message(role="assistant", content=marker)]
        text = str(self._tokenizer.apply_chat_template(turn, tokenize=False, **self._template_args))
        tail = self._tokenizer.encode(text.rpartition(marker)[2], add_special_tokens=False)
        special = set(self._tokenizer.all_special_ids)
        return [token for token in tail if token in special][:1]
