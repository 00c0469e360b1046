"""Text to token ids and back: chat templates, streaming Unicode, stop strings.

In: text or chat messages; later single token ids. Out: prompt ids; text pieces that are safe to show. Everything
works token by token, so a text does not depend on how tokens were grouped into blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyflash.environment import return_freed_memory
from hyflash.errors import UserError, reason

REPLACEMENT = "�"
MAX_OPEN = 3
"""Marks at the end of a text that the next token can still change: a character lacks at most 3 of its 4 bytes."""
MAX_TAIL_TOKENS = 16
"""Tokens decoded together at most while they end in no whole character, unless nothing shorter decodes alike."""


class Tokenizer:
    """A transformers tokenizer behind the few calls hyflash makes."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._fast = _plain_backend(tokenizer)
        self.name = name

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a model directory or hub name. Raises UserError when there is none."""
        from transformers import AutoTokenizer

        try:
            tokenizer = cls(AutoTokenizer.from_pretrained(str(path), trust_remote_code=False), str(path))
            return_freed_memory()  # what reading a large vocabulary left behind, about 27 MB of 152K tokens
            return tokenizer
        except Exception as err:  # transformers raises many kinds here
            raise UserError(f"no tokenizer could be loaded from {str(path)!r}: {reason(err)}") from err

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Ids of raw text; where it begins a sequence, with the special tokens that the model has there."""
        return list(self._tokenizer(text, add_special_tokens=begins).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        if self._fast is not None:
            return str(self._fast.decode(ids, skip_special_tokens=True))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

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
        self._first = 0  # ids from here on are the tail, whose end may be half a character
        self._prefix = 0  # context that decides spacing of the tail
        self._before = ""  # text of that context
        self._taken = 0  # characters of the tail that are in `text`
        self.text = ""
        self._shown = 0

    def push(self, token_id: int, *, watch: bool = True) -> bool:
        """Take a token; True when a stop string is complete (and `watch`). The text then ends before it."""
        if self._tokenizer is None:
            return False
        self._ids.append(token_id)
        tail = self._tail(len(self._ids))
        num_open = min(MAX_OPEN, len(tail) - len(tail.rstrip(REPLACEMENT)))
        start = len(self.text)
        self._take_from(tail, len(tail) - num_open)
        if tail and not num_open:  # an empty one (a special token) would be no context for the next
            self._begin_tail(len(self._ids))
        elif len(self._ids) - self._first > MAX_TAIL_TOKENS:
            self._shorten(tail)
        return watch and self._cut_at_stop(start)

    def finish(self) -> None:
        """Decode what was held back."""
        if self._first < len(self._ids):
            tail = self._tail(len(self._ids))
            self._take_from(tail, len(tail))
            self._first, self._taken = len(self._ids), 0

    def take(self, *, final: bool) -> str:
        """New text that can no longer change; a possible beginning of a stop string is held until `final`."""
        end = len(self.text)
        if not final:
            held = max((_overlap(self.text, s) for s in self._stop), default=0)
            end = max(self._shown, end - held)
        piece = self.text[self._shown : end]
        self._shown = end
        return piece

    def _tail(self, end: int) -> str:
        """Text of the tail's tokens up to index `end`, spaced as the tokens before it ask for."""
        assert self._tokenizer is not None
        before, now = self._before, self._tokenizer.decode(self._ids[self._prefix : end])
        # Byte-fallback decoders answer one wrong byte by turning its whole run of bytes into marks.
        return now[len(before) :] if now.startswith(before) else self._tokenizer.decode(self._ids[self._first : end])

    def _begin_tail(self, first: int, taken: int = 0) -> None:
        """Let the tail begin at a later token; what was the tail before it is its context."""
        assert self._tokenizer is not None
        self._prefix, self._first, self._taken = self._first, first, taken
        self._before = self._tokenizer.decode(self._ids[self._prefix : first])

    def _take_from(self, tail: str, end: int) -> None:
        self.text += tail[self._taken : max(self._taken, end)]
        self._taken = max(self._taken, end)

    def _shorten(self, tail: str) -> None:
        """Let go of the tail's older tokens, cut between characters: both halves must decode to what the whole did."""
        assert self._tokenizer is not None
        for end in range(len(self._ids) - 3, len(self._ids) - 7, -1):
            left = self._tail(end)
            if len(left) <= self._taken and left + self._tokenizer.decode(self._ids[end:]) == tail:
                self._begin_tail(end, self._taken - len(left))
                return

    def _cut_at_stop(self, start: int) -> bool:
        found = [at for s in self._stop if (at := self.text.find(s, max(0, start - len(s) + 1))) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._first = len(self._ids)  # an open end behind the stop string is not shown either
        return bool(found)


def _plain_backend(tokenizer: Any) -> Any:
    """The Rust tokenizer where the transformers one decodes with nothing else: a quarter of the time of each token."""
    from transformers import PreTrainedTokenizerFast as Fast

    own = type(tokenizer)
    is_plain = issubclass(own, Fast) and (own.decode, own._decode) == (Fast.decode, Fast._decode)
    return tokenizer.backend_tokenizer if is_plain else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
