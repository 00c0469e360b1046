"""Text to token ids and back: chat templates, streaming Unicode, stop strings.

In: text or chat messages; later single token ids. Out: prompt ids; text pieces that are safe to show. Everything
works token by token, so a text does not depend on how tokens were grouped into blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyflash.errors import UserError

REPLACEMENT = "�"
MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes; a longer run of undecodable tokens is junk and is let through."""


class Tokenizer:
    """A transformers tokenizer behind the few calls hyflash makes."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a model directory or hub name. Raises UserError when there is none."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(path)), str(path))
        except Exception as err:  # transformers raises many kinds here
            first = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
            raise UserError(f"no tokenizer could be loaded from {str(path)!r}: {first}") from err

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the model's own leading special tokens."""
        return list(self._tokenizer(text).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def supports_thinking(self) -> bool:
        """Whether the chat template has a thinking switch."""
        return "enable_thinking" in str(self._tokenizer.chat_template or "")

    def chat(self, messages: Sequence[Mapping[str, str]], thinking: bool | None = None) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer. Raises UserError where the template cannot."""
        if not self.has_template:
            raise UserError(f"{self.name} has no chat template; use --raw to continue plain text.")
        if thinking is not None and not self.supports_thinking:
            raise UserError(f"the chat template of {self.name} has no thinking switch; leave --thinking out.")
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as err:  # templates raise their own errors for roles they do not know
            raise UserError(f"the chat template of {self.name} refuses these messages: {err}") from err
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


class TextStream:
    """Turns committed tokens into text, one token at a time, and watches for stop strings."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        if stop and tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this engine has none.")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._first = 0  # ids before it are decoded for good
        self._prefix = 0  # context that decides spacing of the next piece
        self.text = ""
        self._shown = 0

    def push(self, token_id: int, *, watch: bool = True) -> bool:
        """Take a token; True when a stop string is complete (and `watch`). The text then ends before it."""
        if self._tokenizer is None:
            return False
        self._ids.append(token_id)
        before = self._tokenizer.decode(self._ids[self._prefix : self._first])
        now = self._tokenizer.decode(self._ids[self._prefix :])
        if now.endswith(REPLACEMENT) and len(self._ids) - self._first < MAX_HELD_TOKENS:
            return False
        start = len(self.text)
        self.text += now[len(before) :]
        self._prefix, self._first = self._first, len(self._ids)
        return watch and self._cut_at_stop(start)

    def finish(self) -> None:
        """Decode what was held back."""
        if self._tokenizer is not None and self._first < len(self._ids):
            before = self._tokenizer.decode(self._ids[self._prefix : self._first])
            self.text += self._tokenizer.decode(self._ids[self._prefix :])[len(before) :]
            self._first = len(self._ids)

    def take(self, *, final: bool) -> str:
        """New text that can no longer change; a possible beginning of a stop string is held until `final`."""
        end = len(self.text)
        if not final:
            held = max((_overlap(self.text, s) for s in self._stop), default=0)
            end = max(self._shown, end - held)
        piece = self.text[self._shown : end]
        self._shown = end
        return piece

    def _cut_at_stop(self, start: int) -> bool:
        found = [at for s in self._stop if (at := self.text.find(s, max(0, start - len(s) + 1))) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
