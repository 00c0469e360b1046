"""The Hugging Face target on tiny random checkpoints of the real classes: transformers' own forward is the oracle."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from families import CONTEXT, FAMILIES, LAYERS, VOCAB, family_dir, feed, text
from helpers import tiny_target_dir
from hyflash import hub
from hyflash.core import Rows
from hyflash.errors import HyflashError, UserError
from hyflash.targets import hf
from hyflash.targets.fingerprint import fingerprint
from native_models import write_gguf

torch.set_num_threads(1)
TAPS = (1, LAYERS, 0)  # out of order on purpose: features come in the order asked for
LENGTH = 75  # more than nine windows, and into the second bucket of the cache


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_dir(tmp_path_factory.mktemp("families"), family)


@pytest.fixture(scope="module")
def target(path: Path) -> hf.HFTarget:
    return hf.load(str(path))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> hf.HFTarget:
    return hf.load(str(family_dir(tmp_path_factory.mktemp("llama"), "llama")))


def oracle(path: Path, ids: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits (T, V) and outputs (T, D) of each layer, and of the final norm, by transformers with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    seen: dict[int, Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        return lambda _m, _i, out: seen.update({index: (out[0] if isinstance(out, tuple) else out)[0]})

    for index, layer in enumerate(model.base_model.layers):
        layer.register_forward_hook(keep(index))
    with torch.no_grad():
        out = model(ids[None], output_hidden_states=True)
    for index in range(len(seen) - 1):  # transformers' own list; its last entry is after the final norm
        assert torch.equal(out.hidden_states[index + 1][0], seen[index])
    return out.logits[0], {**seen, len(seen): out.hidden_states[-1][0]}


def test_logits_and_features_are_those_of_transformers(path: Path, target: hf.HFTarget) -> None:
    ids = text(LENGTH)
    want, states = oracle(path, ids)
    seq = target.open()
    got = feed(target, seq, ids, [LENGTH], taps=(0, 1, 2, LAYERS))
    target.close(seq)
    torch.testing.assert_close(got.logits, want, atol=1e-4, rtol=1e-4)
    assert got.features is not None
    for at in range(LAYERS + 1):
        torch.testing.assert_close(got.features[:, at], states[at], atol=1e-4, rtol=1e-4)


def test_features_under_batching_belong_to_their_rows(path: Path, target: hf.HFTarget) -> None:
    texts = [text(n, seed=n) for n in (13, 1, 40, 7)]
    seqs = tuple(target.open() for _ in texts)
    out = target.forward(Rows(tokens=torch.cat(texts), seqs=seqs, lengths=tuple(map(len, texts)), taps=TAPS))
    assert out.features is not None
    first = 0
    for ids in texts:
        states = oracle(path, ids)[1]
        for at, tap in enumerate(TAPS):
            torch.testing.assert_close(out.features[first : first + len(ids), at], states[tap], atol=1e-4, rtol=1e-4)
        first += len(ids)
    for seq in seqs:
        target.close(seq)


def test_embedding_and_head_are_what_the_model_itself_uses(path: Path, target: hf.HFTarget) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    seen: list[Tensor] = []
    model.base_model.layers[0].register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    ids, hooks = text(9), target.hooks()
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
        torch.testing.assert_close(hooks.embed(ids), seen[0][0])
        seq = target.open()
        final = feed(target, seq, ids, [9], taps=(LAYERS,)).features
        target.close(seq)
        assert final is not None
        torch.testing.assert_close(hooks.head(final[:, 0]), logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(hooks.head_rows(torch.tensor([5, 0])), target.model.get_output_embeddings().weight[[5, 0]])  # type: ignore[operator]


def test_info_states_the_models_facts(family: str, path: Path, target: hf.HFTarget) -> None:
    info = target.info
    assert (info.family, info.vocab_size, info.hidden_size, info.num_layers) == (family, VOCAB, 32, LAYERS)
    assert (info.num_heads, info.intermediate_size) == (4, 64)
    assert info.num_kv_heads == FAMILIES[family][2].get("num_key_value_heads", 2)
    assert info.head_dim == FAMILIES[family][2].get("head_dim", 8)
    assert (info.max_context, info.eos_token_ids, info.dtype) == (CONTEXT, (2,), "float32")
    assert (info.name, info.fingerprint) == (path.name, fingerprint(path))


# ---------------------------------------------------------------------------------- row invariance


@pytest.fixture(scope="module")
def alone(target: hf.HFTarget) -> tuple[Tensor, Tensor, Tensor]:
    """A text, its logits and its features, fed token by token."""
    ids = text(LENGTH)
    seq = target.open()
    out = feed(target, seq, ids, [1] * LENGTH, taps=TAPS)
    target.close(seq)
    assert out.logits is not None
    assert out.features is not None
    return ids, out.logits, out.features


def test_tiny_checkpoints_are_row_invariant_on_this_machine(target: hf.HFTarget) -> None:
    if os.environ["MKL_CBWR"] == "AUTO,STRICT" and torch.backends.mkl.is_available():
        assert (target.exactness, target.epsilon) == ("invariant", 0.0)


def test_any_chunks_give_the_bits_of_token_by_token(target: hf.HFTarget, alone: tuple[Tensor, Tensor, Tensor]) -> None:
    if target.exactness != "invariant":
        pytest.skip("this machine's matrix products are not row-invariant")
    ids, logits, features = alone
    rng = random.Random(0)
    splits = [[LENGTH], [2] * 37 + [1], [63, 1, 1, 10], [64, 11], [1, 16, 8, 4, 2, 5, 3, 7, 29]]
    for _ in range(3):
        cuts = sorted(rng.sample(range(1, LENGTH), 6))
        splits.append([b - a for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)])
    for widths in splits:
        seq = target.open()
        out = feed(target, seq, ids, widths, taps=TAPS)
        target.close(seq)
        assert torch.equal(out.logits, logits), widths  # type: ignore[arg-type]
        assert torch.equal(out.features, features), widths  # type: ignore[arg-type]


def test_ragged_batches_give_the_bits_of_a_row_alone(target: hf.HFTarget, alone: tuple[Tensor, Tensor, Tensor]) -> None:
    if target.exactness != "invariant":
        pytest.skip("this machine's matrix products are not row-invariant")
    ids, logits, features = alone
    rng = random.Random(1)
    others = [target.open() for _ in range(3)]
    seq, done = target.open(), 0
    while done < LENGTH:
        n = min(rng.choice([1, 2, 3, 9]), LENGTH - done)
        batch = [(other, text(rng.randrange(1, 8), seed=done + other)) for other in others]
        place = rng.randrange(4)
        batch.insert(place, (seq, ids[done : done + n]))
        lengths = tuple(len(tokens) for _, tokens in batch)
        rows = Rows(
            tokens=torch.cat([tokens for _, tokens in batch]),
            seqs=tuple(s for s, _ in batch),
            lengths=lengths,
            taps=TAPS,
        )
        out, first = target.forward(rows), sum(lengths[:place])
        assert torch.equal(out.logits[first : first + n], logits[done : done + n])  # type: ignore[index]
        assert torch.equal(out.features[first : first + n], features[done : done + n])  # type: ignore[index]
        done += n
        for other in others:
            if target.length(other) > CONTEXT - 20:
                target.truncate(other, 3)
    for s in (seq, *others):
        target.close(s)


def test_logits_of_the_last_rows_are_those_of_all_rows(target: hf.HFTarget) -> None:
    texts = [text(n, seed=n) for n in (5, 1, 9)]
    seqs = tuple(target.open() for _ in texts)

    def run(logits: str) -> Tensor | None:
        for seq in seqs:
            target.truncate(seq, 0)
        rows = Rows(tokens=torch.cat(texts), seqs=seqs, lengths=(5, 1, 9), logits=logits)  # type: ignore[arg-type]
        return target.forward(rows).logits

    every, last = run("all"), run("last")
    assert every is not None
    assert last is not None
    torch.testing.assert_close(last, every[[4, 5, 14]])
    assert run("none") is None
    for seq in seqs:
        target.close(seq)


# ---------------------------------------------------------------------------------------- rollback


@pytest.mark.parametrize("length", [5, 8, 20])
def test_rollback_to_every_index_equals_a_fresh_prefill(target: hf.HFTarget, length: int) -> None:
    prompt, block, more = text(length, seed=1), text(9, seed=2), text(3, seed=3)
    for kept in range(len(block) + 1):
        seq, fresh = target.open(), target.open()
        feed(target, seq, prompt, [length])
        feed(target, seq, block, [len(block)])
        target.truncate(seq, length + kept)
        got = feed(target, seq, more, [3], taps=TAPS)
        committed = torch.cat((prompt, block[:kept]))
        feed(target, fresh, committed, [len(committed)])
        want = feed(target, fresh, more, [3], taps=TAPS)
        if target.exactness == "invariant":
            assert torch.equal(got.logits, want.logits)  # type: ignore[arg-type]
            assert torch.equal(got.features, want.features)  # type: ignore[arg-type]
        torch.testing.assert_close(got.logits, want.logits)
        assert target.length(seq) == length + kept + 3
        target.close(seq)
        target.close(fresh)


def test_a_used_slot_serves_the_next_sequence_as_a_new_one_would(llama: hf.HFTarget) -> None:
    first, second = text(90, seed=1), text(30, seed=2)
    fresh = llama.open()
    want = feed(llama, fresh, second, [30]).logits
    used = llama.open()
    feed(llama, used, first, [90])
    llama.close(used)
    again = llama.open()
    assert again == used
    assert llama.length(again) == 0
    assert torch.equal(feed(llama, again, second, [30]).logits, want)  # type: ignore[arg-type]
    llama.close(again)
    llama.close(fresh)


def test_kv_bytes_count_the_tokens_of_open_sequences(llama: hf.HFTarget) -> None:
    per_token = LAYERS * 2 * llama.info.num_kv_heads * llama.info.head_dim * 4
    assert llama.kv_bytes() == 0
    a, b = llama.open(), llama.open()
    feed(llama, a, text(10), [10])
    feed(llama, b, text(100), [100])
    assert llama.kv_bytes() == 110 * per_token
    llama.truncate(b, 1)
    assert llama.kv_bytes() == 11 * per_token
    llama.close(a)
    llama.close(b)
    assert llama.kv_bytes() == 0


# --------------------------------------------------------------------------------------------- NaN


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> hf.HFTarget:
    """Token 9 has an embedding of NaN."""
    path = family_dir(tmp_path_factory.mktemp("poisoned"), "llama", tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return hf.load(str(path))


def clean(length: int, seed: int) -> Tensor:
    ids = text(length, seed)
    return torch.where(ids == 9, 10, ids)


def test_nan_in_one_sequence_leaves_the_others_alone(poisoned: hf.HFTarget) -> None:
    bad, good, alone = poisoned.open(), poisoned.open(), poisoned.open()
    want = feed(poisoned, alone, clean(6, 1), [6], taps=(0,))
    for order in ((bad, good), (good, bad)):
        for seq in order:
            poisoned.truncate(seq, 0)
        texts = {bad: torch.tensor([4, 9, 5]), good: clean(6, 1)}
        rows = Rows(
            tokens=torch.cat([texts[s] for s in order]),
            seqs=order,
            lengths=tuple(len(texts[s]) for s in order),
            taps=(0,),
        )
        out = poisoned.forward(rows)
        first = 3 if order[0] == bad else 0
        assert torch.equal(out.logits[first : first + 6], want.logits)  # type: ignore[index, arg-type]
        assert torch.equal(out.features[first : first + 6], want.features)  # type: ignore[index, arg-type]
        assert torch.isfinite(out.features).all()  # type: ignore[arg-type]
    for seq in (bad, good, alone):
        poisoned.close(seq)


def test_nan_does_not_reach_the_next_user_of_a_slot_nor_the_same_one_after_a_rollback(poisoned: hf.HFTarget) -> None:
    fresh = poisoned.open()
    want = feed(poisoned, fresh, clean(6, 1), [6]).logits
    bad = poisoned.open()
    feed(poisoned, bad, torch.tensor([4, 5, 9, 5, 6]), [5])
    poisoned.truncate(bad, 0)
    assert torch.equal(feed(poisoned, bad, clean(6, 1), [6]).logits, want)  # type: ignore[arg-type]
    feed(poisoned, bad, torch.tensor([9]), [1])
    poisoned.close(bad)
    again = poisoned.open()
    assert again == bad
    assert torch.equal(feed(poisoned, again, clean(6, 1), [6]).logits, want)  # type: ignore[arg-type]
    poisoned.close(again)
    poisoned.close(fresh)


def test_features_stay_within_half_precision(llama: hf.HFTarget) -> None:
    layer = llama.model.base_model.layers[1]  # type: ignore[union-attr, index]
    handle = layer.register_forward_hook(lambda _m, _i, out: out * 1e9, prepend=True)  # type: ignore[union-attr]
    seq = llama.open()
    features = feed(llama, seq, text(3), [3], taps=(1,)).features
    handle.remove()
    llama.close(seq)
    assert features is not None
    assert features.abs().max() == hf.FEATURE_LIMIT


# ------------------------------------------------------------------------------------------ faults


def test_a_context_is_filled_to_the_last_token_and_not_beyond(llama: hf.HFTarget) -> None:
    seq = llama.open()
    feed(llama, seq, text(CONTEXT - 1), [CONTEXT - 1])
    feed(llama, seq, text(1), [1])
    with pytest.raises(UserError, match=f"257 tokens do not fit .*{CONTEXT}"):
        feed(llama, seq, text(1), [1])
    assert llama.length(seq) == CONTEXT
    llama.truncate(seq, 10)
    feed(llama, seq, text(2), [2])
    llama.close(seq)


@pytest.mark.parametrize("tap", [-1, LAYERS + 1])
def test_taps_out_of_range_are_refused(llama: hf.HFTarget, tap: int) -> None:
    seq = llama.open()
    with pytest.raises(UserError, match=f"tap {tap} .*0 to {LAYERS}"):
        feed(llama, seq, text(2), [2], taps=(tap,))
    assert llama.length(seq) == 0
    llama.close(seq)


def test_malformed_rows_and_closed_sequences_are_refused(llama: hf.HFTarget) -> None:
    seq = llama.open()
    for rows in (
        Rows(tokens=text(3), seqs=(seq,), lengths=(2,)),
        Rows(tokens=text(2), seqs=(seq, seq), lengths=(1, 1)),
        Rows(tokens=text(0), seqs=(seq,), lengths=(0,)),
    ):
        with pytest.raises(HyflashError, match="malformed"):
            llama.forward(rows)
    llama.close(seq)
    with pytest.raises(HyflashError, match="not open"):
        llama.forward(Rows(tokens=text(1), seqs=(seq,), lengths=(1,)))
    with pytest.raises(ValueError, match="not open"):
        llama.close(seq)


def refusal(path: Path | str, **options: str) -> str:
    with pytest.raises(UserError) as caught:
        hf.load(str(path), **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert len(message.replace(str(path), "MODEL")) < 400
    return message


def test_unknown_paths_and_dtypes_are_refused(tmp_path: Path) -> None:
    assert "neither a directory nor a hub name" in refusal(tmp_path / "nothing")
    assert "neither a directory nor a hub name" in refusal("./nothing/here")
    assert "config.json" in refusal(tmp_path)
    assert "expected one of float32" in refusal(tmp_path, dtype="int8")


def test_a_truncated_or_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    weights = family_dir(tmp_path, "llama") / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "cannot load target" in refusal(weights.parent)
    weights.write_bytes(whole[:5])
    assert "cannot load target" in refusal(weights.parent)
    weights.unlink()
    assert "cannot load target" in refusal(weights.parent)
    (weights.parent / "config.json").write_text("{not json")
    assert "cannot load target" in refusal(weights.parent)


def test_a_checkpoint_that_lacks_a_weight_is_refused_not_filled_with_random_numbers(tmp_path: Path) -> None:
    path = family_dir(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    said = refusal(path)
    assert "lack 1 weights" in said
    assert "model.layers.1.mlp.up_proj.weight" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers above 0"),
        ({"num_hidden_layers": 5}, "lack"),
        ({"num_attention_heads": 0}, "cannot load"),
        ({"vocab_size": 90}, "other shapes"),
        ({"max_position_embeddings": 0}, "max_position_embeddings above 0"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"hidden_size": "wide"}, "expected int"),
        ({"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own"}, "custom code"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_its_weights_is_one_sentence(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    config = family_dir(tmp_path, "llama") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    assert words in refusal(config.parent)


def test_an_end_token_beyond_the_vocabulary_never_comes_and_does_no_harm(tmp_path: Path) -> None:
    config = family_dir(tmp_path, "llama") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": 99999}))
    (config.parent / "generation_config.json").unlink()
    assert hf.load(str(config.parent)).info.eos_token_ids == ()


def test_longrope_is_served_up_to_where_its_frequencies_change(tmp_path: Path) -> None:
    """Beyond, one long row of a batch turned the frequencies of all others, and their texts with them."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 100}
    path = family_dir(
        tmp_path,
        "phi3",
        original_max_position_embeddings=100,
        rope_parameters={**rope, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    )
    target = hf.load(str(path))
    assert target.info.max_context == 100
    seq = target.open()
    with pytest.raises(UserError, match="do not fit the context"):
        feed(target, seq, text(101), [101])
    ids = text(100)
    got = feed(target, seq, ids, [90, 10]).logits
    want, _ = oracle(path, ids)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    target.close(seq)


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


def test_models_that_are_no_causal_decoders_are_refused(tmp_path: Path) -> None:
    t5 = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert "t5" in refusal(tmp_path / "t5").lower()
    bert = transformers.BertConfig(**SMALL, is_decoder=True)
    transformers.BertLMHeadModel(bert).save_pretrained(tmp_path / "bert")
    assert "bert model has no list of decoder layers" in refusal(tmp_path / "bert")


def test_models_with_recurrent_layers_are_refused(tmp_path: Path) -> None:
    mamba = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96, state_size=4)
    transformers.MambaForCausalLM(mamba).save_pretrained(tmp_path / "mamba")
    assert "mamba" in refusal(tmp_path / "mamba")
    hybrid = transformers.Qwen3NextConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=0, decoder_sparse_step=10, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.Qwen3NextForCausalLM(hybrid).save_pretrained(tmp_path / "hybrid")
    assert "linear_attention cannot roll back" in refusal(tmp_path / "hybrid")


def test_decoders_whose_attention_is_not_ours_to_replace_are_refused(tmp_path: Path) -> None:
    sinks = transformers.GptOssConfig(**SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=2)
    transformers.GptOssForCausalLM(sinks).save_pretrained(tmp_path / "sinks")
    assert "attention uses sinks" in refusal(tmp_path / "sinks")
    own = transformers.FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    transformers.FalconForCausalLM(own).save_pretrained(tmp_path / "own")
    assert "attention cannot be replaced" in refusal(tmp_path / "own")


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("Granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
        ("Cohere", {"logit_scale": 0.25}),
    ],
)
def test_scaled_embeddings_and_logits_are_honoured(name: str, scales: dict[str, float], tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL, num_key_value_heads=2, initializer_range=0.3, **scales)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    target, ids = hf.load(str(tmp_path)), text(20)
    seq = target.open()
    torch.testing.assert_close(feed(target, seq, ids, [20]).logits, oracle(tmp_path, ids)[0], atol=1e-4, rtol=1e-4)


def test_layers_with_a_hidden_recurrence_are_found_by_feeding_a_text_in_pieces(llama: hf.HFTarget) -> None:
    """A layer that carries something along the forward, as a state-space layer does, has no place in the cache."""
    layer = llama.model.base_model.layers[0]  # type: ignore[union-attr, index]
    handle = layer.register_forward_hook(lambda _m, _i, out: out + out.cumsum(1), prepend=True)  # type: ignore[union-attr]
    try:
        with pytest.raises(UserError, match="fed in pieces"):
            llama._calibrate()
    finally:
        handle.remove()


# -------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("content", [b"", b"abc", bytes(64), b"\x02" + bytes(7) + b"[]", b"\xff" * 64])
def test_a_weight_file_that_is_none_is_named_by_the_fingerprint(tmp_path: Path, content: bytes) -> None:
    """A file that is no part of the model, or a download that was cut off."""
    (tmp_path / "adapter.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"adapter\.safetensors is no whole safetensors file"):
        fingerprint(tmp_path)


def test_the_fingerprint_tells_models_apart_and_copies_not(tmp_path: Path) -> None:
    one = family_dir(tmp_path, "llama", name="one")
    model = AutoModelForCausalLM.from_pretrained(one)
    model.save_pretrained(tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == fingerprint(one)
    assert fingerprint(family_dir(tmp_path, "llama", name="two", seed=1)) != fingerprint(one)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    model.save_pretrained(tmp_path / "tuned")
    assert fingerprint(tmp_path / "tuned") != fingerprint(one)
    assert fingerprint("owner/name") == fingerprint("owner/name") != fingerprint("owner/other")


def test_half_precision_loads_and_is_rechecked(tmp_path: Path) -> None:
    target = hf.load(str(family_dir(tmp_path, "llama")), dtype="bfloat16")
    assert target.info.dtype == "bfloat16"
    assert target.exactness == "recheck", "a short text without differences proves nothing at 8 bits"
    assert target.epsilon > 0
    seq = target.open()
    out = feed(target, seq, text(9), [9], taps=(0, LAYERS))
    assert out.logits is not None
    assert out.logits.dtype == torch.float32
    reference = hf.load(str(tmp_path / "llama-model"))
    other = reference.open()
    want = feed(reference, other, text(9), [9]).logits
    assert torch.nn.functional.cosine_similarity(out.logits, want).min() > 0.98  # type: ignore[arg-type]


# Widths of 48 end in a scalar tail of the elementwise kernels, whose bits differ: rows are not invariant.
_WITHOUT_STRICT_MODE = """
import torch
torch.set_num_threads(1)
torch.ones(64, 64) @ torch.ones(64, 64)  # MKL's first call comes before the load
from hyflash.core import Request, SamplingParams
from hyflash.drafters import load_class
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.targets import hf
import sys
target = hf.load(sys.argv[1])
requests = [
    Request(prompt_ids=(5, 6, 7, 5, 6), params=SamplingParams(max_tokens=60, ignore_eos=True, temperature=t, seed=3))
    for t in (0.0, 0.9)
]
method = load_class("lookup")
plain = [Engine(target).generate([r])[0].token_ids for r in requests]
for k in (1, 3, 7):
    engine = Engine(target, method(method.Config.tiny(), target.hooks()), policy=FixedLength(k))
    assert [r.token_ids for r in engine.generate(requests)] == plain, k
print(target.exactness, target.epsilon > 0)
"""


def test_without_invariant_rows_texts_are_still_the_same(tmp_path: Path) -> None:
    path = family_dir(tmp_path, "llama", intermediate_size=48)
    environment = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_STRICT_MODE, str(path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["recheck", "True"]


# -------------------------------------------------------------------------------------------- GGUF


def test_a_gguf_file_gives_the_logits_of_the_checkpoint_it_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path / "cache"))
    path = tiny_target_dir(tmp_path)
    target = hf.load(hub.resolve_target(str(write_gguf(path, tmp_path / "tiny.gguf", tokenizer=True))))
    ids = torch.arange(5, 45)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    seq = target.open()
    torch.testing.assert_close(feed(target, seq, ids, [40]).logits, want, atol=1e-4, rtol=1e-4)
    assert target.info.eos_token_ids == (2,)
