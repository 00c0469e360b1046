"""Tokens to text as they come: Unicode across tokens and blocks, stop strings, chat templates."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers import CHATML, THINKING, tiny_tokenizer
from hyflash.errors import UserError
from hyflash.text import MAX_OPEN, MAX_TAIL_TOKENS, TextStream, Tokenizer

TEXTS = {
    "emoji": "Hi 👋🏽 there 👩‍👩‍👧‍👦!",
    "flags": "🇫🇷🇯🇵",
    "cjk": "你好、世界。ありがとう",
    "combining": "e\u0301a\u0308\u0323 नमस्ते",
    "mixed": "a😀b你c\u0301d",
    "ascii": "plain words\n\n  and  spaces ",
    "mark": "a real \ufffd in the text \ufffd",
    "empty": "",
}
BYTES = {
    "lone continuation": b"ab\x80\x81cd",
    "cut character": b"ok \xe4\xbd then",
    "cut at the end": b"ok \xf0\x9f\x98",
    "overlong and invalid": b"\xc0\xaf\xf5\xff\xed\xa0\x80x",
    "junk then a character": b"\x80" * 30 + "你好".encode(),
    "lead bytes only": b"\xf0" * 40,
    "long junk, characters inside": (b"\xff\xfe\xe4\xbd" * 5 + "é😀".encode()) * 4,
}


def byte_tokenizer(template: str | None = CHATML) -> Tokenizer:
    """One token per byte."""
    return Tokenizer(tiny_tokenizer(template=template), "tiny")


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Token ids of raw bytes, also of bytes that are no text."""
    names = {byte: name for name, byte in zip(_byte_names(), range(256), strict=True)}
    table = tokenizer._tokenizer.get_vocab()
    return [table[names[b]] for b in data]


def _byte_names() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def word_tokenizer() -> Tokenizer:
    """Words with a leading-space mark, and byte fallback, as in Llama 2's vocabulary."""
    words = ["▁Hello", "▁world", "▁the", "ing", "▁", "!", "▁stop", "ped"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    core = Core(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return Tokenizer(fast, "words")


def word_ids(tokenizer: Tokenizer, *parts: str | bytes) -> list[int]:
    table, out = tokenizer._tokenizer.get_vocab(), []
    for part in parts:
        out += [3 + b for b in part] if isinstance(part, bytes) else [table[part]]
    return out


def stream(
    tokenizer: Tokenizer, ids: list[int], blocks: list[int] | None = None, stop: tuple[str, ...] = ()
) -> list[str]:
    """The pieces shown when tokens come in blocks (default: one by one), the last one final."""
    out, pieces, at, ended = TextStream(tokenizer, stop), [], 0, False
    for size in blocks or [1] * len(ids):
        for token in ids[at : at + size]:
            if out.push(token):
                ended = True
                break
        at += size
        if ended:
            break
        pieces.append(out.take(final=False))
    out.finish()
    pieces.append(out.take(final=True))
    assert "".join(pieces) == out.text
    return pieces


def groupings(length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    out = [[length]] if length else []
    for most in (2, 3, 7):
        blocks, left = [], length
        while left:
            blocks.append(min(left, rng.randint(1, most)))
            left -= blocks[-1]
        out.append(blocks)
    return out


# ------------------------------------------------------------------------------------------- Unicode


@pytest.mark.parametrize("name", TEXTS)
def test_streamed_text_is_the_text_decoded_at_once(name: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(TEXTS[name])
    assert tokenizer.decode(ids) == TEXTS[name]
    for blocks in [None, *groupings(len(ids))]:
        assert "".join(stream(tokenizer, ids, blocks)) == TEXTS[name]


@pytest.mark.parametrize("name", BYTES)
def test_broken_bytes_stream_to_what_they_decode_to_at_once(name: str) -> None:
    tokenizer = byte_tokenizer()
    ids = ids_of(tokenizer, BYTES[name])
    for blocks in [None, *groupings(len(ids))]:
        assert "".join(stream(tokenizer, ids, blocks)) == BYTES[name].decode(errors="replace")


def test_random_bytes_and_text_stream_to_what_they_decode_to_at_once() -> None:
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    for trial in range(60):
        data = b"".join(
            rng.choice([bytes([rng.randrange(256)]), rng.choice("a é你😀\n").encode()])
            for _ in range(rng.randrange(1, 70))
        )
        ids = ids_of(tokenizer, data)
        for blocks in groupings(len(ids), seed=trial):
            assert "".join(stream(tokenizer, ids, blocks)) == data.decode(errors="replace")


def test_no_piece_ends_inside_a_character() -> None:
    tokenizer = byte_tokenizer()
    for name, text in TEXTS.items():
        if name != "mark":
            assert all("\ufffd" not in piece for piece in stream(tokenizer, tokenizer.encode(text)))


@pytest.mark.parametrize("data", [*BYTES.values(), bytes(range(256))], ids=[*BYTES, "every byte"])
def test_what_is_held_back_is_bounded(data: bytes) -> None:
    tokenizer = byte_tokenizer()
    out, whole = TextStream(tokenizer), ""
    for at, token in enumerate(ids_of(tokenizer, data)):
        out.push(token)
        whole = data[: at + 1].decode(errors="replace")
        assert len(whole) - len(out.text) <= MAX_OPEN
        assert len(out._ids) - out._first <= MAX_TAIL_TOKENS + MAX_OPEN + 1


def test_an_empty_stream_and_special_tokens_give_no_text() -> None:
    tokenizer = byte_tokenizer()
    assert stream(tokenizer, []) == [""]
    assert "".join(stream(tokenizer, [0, 1, 2, 3])) == ""
    ids = tokenizer.encode("a👋b")
    assert "".join(stream(tokenizer, [1, *ids[:3], *ids[3:], 3, 2])) == "a👋b"


def test_spaces_between_words_survive_streaming() -> None:
    tokenizer = word_tokenizer()
    ids = word_ids(tokenizer, "▁Hello", "▁world", "!", "▁", "▁the", "ing")
    assert tokenizer.decode(ids) == "Hello world!  theing"
    for blocks in [None, *groupings(len(ids))]:
        assert "".join(stream(tokenizer, ids, blocks)) == "Hello world!  theing"


def test_a_skipped_token_between_words_does_not_swallow_the_space() -> None:
    tokenizer = word_tokenizer()
    ids = [*word_ids(tokenizer, "▁Hello"), 2, 1, *word_ids(tokenizer, "▁world")]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "Hello world"


@pytest.mark.parametrize("text", ["👋🏽", "你好", "é"])
def test_characters_made_of_byte_tokens_stream_whole(text: str) -> None:
    tokenizer = word_tokenizer()
    ids = word_ids(tokenizer, "▁Hello", text.encode(), "▁world", text.encode())
    for blocks in [None, *groupings(len(ids))]:
        pieces = stream(tokenizer, ids, blocks)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert all("\ufffd" not in piece for piece in pieces)


def test_a_wrong_byte_token_costs_no_character_already_shown() -> None:
    tokenizer = word_tokenizer()
    ids = word_ids(tokenizer, "▁Hello", "你".encode(), b"\xff", "▁world")
    assert "".join(stream(tokenizer, ids)) == "Hello你\ufffd world"
    long = word_ids(tokenizer, "▁Hello", b"\xff" * 50, "▁world")
    assert "".join(stream(tokenizer, long)) == "Hello" + "\ufffd" * 50 + " world"


# ----------------------------------------------------------------------------------------- decoding


def decoded(fast: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """What transformers makes of ids."""
    text = fast.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_random_ids_decode_as_by_transformers(kind: str, clean_up: bool, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer() if kind == "bytes" else word_tokenizer()
    fast = tokenizer._tokenizer
    fast.clean_up_tokenization_spaces = clean_up  # not asked for, whatever the tokenizer's own habit is
    fast.add_tokens(["<tool>", " n't"])
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|more|>"]})
    fast.save_pretrained(tmp_path)
    rng, special, words = (
        random.Random(0),
        fast.all_special_ids,
        fast.encode("a , b . c <tool>", add_special_tokens=False),
    )
    assert len(special) >= 4
    for made in (tokenizer, Tokenizer.from_dir(tmp_path)):
        assert made._fast is not None
        for _ in range(300):
            choose = rng.choice(
                [lambda: rng.randrange(len(fast)), lambda: rng.choice(special), lambda: rng.choice(words)]
            )
            ids = [choose() if rng.random() < 0.7 else rng.randrange(len(fast)) for _ in range(rng.randrange(12))]
            assert made.decode(ids) == made.decode(tuple(ids)) == decoded(fast, ids)
        assert made.decode(words) == decoded(fast, words)
        assert made.decode(special) == ""


@pytest.mark.parametrize("method", ["_decode", "decode"])
def test_a_tokenizer_that_decodes_in_its_own_way_is_left_to_it(method: str) -> None:
    def shout(self: PreTrainedTokenizerFast, *args: object, **options: object) -> str:
        return str(getattr(PreTrainedTokenizerFast, method)(self, *args, **options)).upper()

    own = type("Own", (PreTrainedTokenizerFast,), {method: shout})
    fast = own(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<|im_end|>")
    tokenizer = Tokenizer(fast, "own")
    ids = [*fast.encode("quiet, please"), 2]
    assert tokenizer.decode(ids) == decoded(fast, ids) == "QUIET, PLEASE"
    assert "".join(stream(tokenizer, ids)) == "QUIET, PLEASE"


# -------------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("stop", ["END", "E", "x END", "👋", "é", "END\n\n", "ab", "aab"])
def test_the_text_ends_before_the_stop_string_however_tokens_come(stop: str) -> None:
    tokenizer = byte_tokenizer()
    text = "aaab x EN Ex END\n\n👋 é and more"
    ids = tokenizer.encode(text)
    want = text[: text.index(stop)]
    for blocks in [None, *groupings(len(ids))]:
        assert "".join(stream(tokenizer, ids, blocks, (stop,))) == want


def test_no_part_of_a_stop_string_is_ever_shown() -> None:
    tokenizer = byte_tokenizer()
    for text, stop in (("one STOP two", "STOP"), ("aXaXaY", "aXaY"), ("x\n\n\nUser:", "\n\nUser:")):
        ids, want = tokenizer.encode(text), text[: text.index(stop)]
        for blocks in [None, *groupings(len(ids))]:
            shown = ""
            for piece in stream(tokenizer, ids, blocks, (stop,)):
                shown += piece
                assert want.startswith(shown)


def test_a_possible_beginning_of_a_stop_string_is_held_until_it_is_decided() -> None:
    tokenizer = byte_tokenizer()
    out = TextStream(tokenizer, ("</s>",))
    shown = []
    for token in tokenizer.encode("a</sb</"):
        assert not out.push(token)
        shown.append(out.take(final=False))
    assert shown == ["a", "", "", "", "</sb", "", ""]
    out.finish()
    assert out.take(final=True) == "</"


def test_of_two_stop_strings_the_one_that_completes_first_ends_the_text() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("xx abcd")
    for stop, want in (
        (("abcd", "ab"), "xx "),
        (("ab", "abcd"), "xx "),
        (("abcd", "bc"), "xx a"),
        (("zz", "d"), "xx abc"),
    ):
        assert "".join(stream(tokenizer, ids, stop=stop)) == want


def test_several_stop_strings_in_one_token_cut_at_the_earliest() -> None:
    tokenizer = word_tokenizer()
    ids = word_ids(tokenizer, "▁Hello", "▁stop", "ped")
    assert "".join(stream(tokenizer, ids, stop=("op", "st"))) == "Hello "


def test_a_stop_string_may_begin_the_text_and_may_be_its_first_token() -> None:
    tokenizer = byte_tokenizer()
    assert "".join(stream(tokenizer, tokenizer.encode("END x"), stop=("END",))) == ""
    assert "".join(stream(tokenizer, tokenizer.encode("x"), stop=("x",))) == ""


def test_a_stop_string_in_a_token_that_ends_in_half_a_character_is_found_at_once() -> None:
    core = Core(models.BPE(vocab={"ENDä½": 0, "Ġ": 1, "a": 2}, merges=[]))
    core.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core), "half")
    out = TextStream(tokenizer, ("END",))
    assert not out.push(2)
    assert out.push(0)
    out.finish()
    assert out.text == "a"


def test_an_unwatched_stop_string_stays_and_only_a_new_one_ends_the_text() -> None:
    tokenizer = byte_tokenizer()
    out = TextStream(tokenizer, ("ab",))
    for token in tokenizer.encode("abab"):
        assert not out.push(token, watch=False)
    hits = [out.push(token) for token in tokenizer.encode("xab")]
    assert hits == [False, False, True]
    assert out.text == "ababx"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(UserError, match="tokenizer"):
        TextStream(None, ("x",))
    silent = TextStream(None)
    assert not silent.push(3)
    silent.finish()
    assert silent.take(final=True) == ""


# ---------------------------------------------------------------------------------------- templates


def test_a_conversation_ends_with_the_assistants_turn_and_has_no_doubled_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    raw = tokenizer._tokenizer.decode(ids)
    assert raw == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(1) == 2


def test_the_thinking_switch_works_where_the_template_has_one() -> None:
    tokenizer = byte_tokenizer(THINKING)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.supports_thinking
    off = tokenizer._tokenizer.decode(tokenizer.chat(messages, thinking=False))
    assert off.endswith("<think>\n\n</think>\n\n")
    on, default = tokenizer.chat(messages, thinking=True), tokenizer.chat(messages)
    assert on == default
    assert "<think>" not in tokenizer._tokenizer.decode(on)


@pytest.mark.parametrize("thinking", [True, False])
def test_the_thinking_switch_is_refused_where_the_template_has_none(thinking: bool) -> None:
    tokenizer = byte_tokenizer()
    assert not tokenizer.supports_thinking
    with pytest.raises(UserError, match="no thinking switch"):
        tokenizer.chat([{"role": "user", "content": "hi"}], thinking=thinking)


def test_a_model_without_template_is_refused_with_the_way_out() -> None:
    tokenizer = byte_tokenizer(None)
    assert not tokenizer.has_template
    with pytest.raises(UserError, match="--raw"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_the_messages_gives_one_sentence() -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer") as caught:
        Tokenizer.from_dir(tmp_path)
    assert "\n" not in str(caught.value)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert Tokenizer.from_dir(tmp_path).encode("ab") == byte_tokenizer().encode("ab")
