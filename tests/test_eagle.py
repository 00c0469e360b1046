"""EAGLE-3: published checkpoints to the number, training-time test, pairs, window, heads, other stores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from block_fakes import DIM, VOCAB, ask, commit_prefix, fake_batch, fake_hooks
from drafting import ask as ask_all
from drafting import assert_training_is_serving, drafts, filled, random_batch, stated, tiny_drafter
from hyflash import checkpoint
from hyflash.core import Commit, TargetHooks
from hyflash.drafters import eagle, eagle_layer
from hyflash.drafters.base import Drafter
from hyflash.drafters.context import ContextStore, GrowingStore
from hyflash.errors import UserError
from hyflash.ops.losses import decay_weights
from hyflash.ops.rope import rope_tables
from published import eagle_drafts

LAYERS = 10
LISTED = sorted(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:24].tolist())


def hooks() -> TargetHooks:
    return fake_hooks(num_layers=LAYERS)


def tiny(**options: Any) -> eagle.DrafterImpl:
    drafter = tiny_drafter("eagle", hooks(), **options)
    assert isinstance(drafter, eagle.DrafterImpl)
    return drafter


# -------------------------------------------------------------------------------------------- published

FLAT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": DIM,
    "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "rms_norm_eps": 1e-5, "rope_theta": 500.0, "max_position_embeddings": 512, "vocab_size": VOCAB,
    "draft_vocab_size": len(LISTED), "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip


def published_weights(config: dict[str, Any], num_taps: int = 3) -> dict[str, Tensor]:
    """Random tensors under speculators' names, for a flat config."""
    torch.manual_seed(5)
    heads, kv = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    size = config.get("draft_vocab_size") or VOCAB
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (DIM, num_taps * DIM), "norm": (DIM,), "lm_head": (size, DIM),
        "layers.0.input_layernorm": (DIM,), "layers.0.hidden_norm": (DIM,), "layers.0.post_attention_layernorm": (DIM,),
        "layers.0.self_attn.q_proj": (heads, 2 * DIM), "layers.0.self_attn.k_proj": (kv, 2 * DIM),
        "layers.0.self_attn.v_proj": (kv, 2 * DIM), "layers.0.self_attn.o_proj": (DIM, heads),
        "layers.0.mlp.gate_proj": (40, DIM), "layers.0.mlp.up_proj": (40, DIM), "layers.0.mlp.down_proj": (DIM, 40),
    }  # fmt: skip
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}": (DIM,) for i in range(num_taps)}
    if config.get("norm_before_fc"):
        shapes["input_norm"] = (num_taps * DIM,)
    if config["model_type"] == "qwen3":
        shapes |= {f"layers.0.self_attn.{p}_norm": (config["head_dim"],) for p in "qk"}
    out = {f"{name}.weight": 0.3 * torch.randn(shape) + (len(shape) == 1) for name, shape in shapes.items()}
    if config["attention_bias"]:
        out |= {f"layers.0.self_attn.{p}_proj.bias": torch.randn({"q": heads, "o": DIM}.get(p, kv)) for p in "qkvo"}
    if size < VOCAB:
        marked = torch.zeros(VOCAB, dtype=torch.bool)
        marked[LISTED] = True
        out |= {"d2t": torch.tensor(LISTED) - torch.arange(size), "t2d": marked}
    return out


def speculators_config(flat: dict[str, Any]) -> dict[str, Any]:
    """The nested spelling of a flat config."""
    top = {"draft_vocab_size", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"}
    body = {key: value for key, value in flat.items() if key not in {*top, "rope_theta", "architectures"}}
    body["rope_parameters"] = {"rope_type": "default", "rope_theta": flat["rope_theta"]}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "model_type": "speculators",
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
        "transformer_layer_config": body,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": {"name_or_path": "fake"},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4, "accept_tolerance": 0.0}],
        },
        **{key: flat[key] for key in top if key in flat},
    }  # fmt: skip


def write(path: Path, config: dict[str, Any], weights: dict[str, Tensor], *, pickled: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, path / "pytorch_model.bin")
    else:
        save_file(weights, path / "model.safetensors")
    return path


def renamed(weights: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in weights.items()}


def safeai(path: Path) -> tuple[Path, dict[str, Any]]:
    """A plain Llama's name, no word on taps or a rotary base, a pickled file with the target's embedding."""
    config = {key: value for key, value in FLAT.items() if key not in ("rope_theta", "head_dim")}
    config |= {"architectures": ["LlamaForCausalLM"], "pretraining_tp": 1}
    full = {**config, "rope_theta": 10000.0, "head_dim": 8}
    weights = renamed(published_weights(full), "layers.0.", "midlayer.")
    weights["embed_tokens.weight"] = hooks().embed(torch.arange(VOCAB))
    return write(path, config, weights, pickled=True), full


def specforge(path: Path) -> tuple[Path, dict[str, Any]]:
    """EAGLE 3.1, and taps as outputs of layers."""
    config = FLAT | {"fc_norm": True, "norm_output": True, "sliding_window": None, "use_sliding_window": False}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}
    return write(path, config, renamed(published_weights(config), "layers.0.", "midlayer.")), config


def vllm(path: Path) -> tuple[Path, dict[str, Any]]:
    """Names with a prefix, the whole vocabulary, biases."""
    config = FLAT | {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": VOCAB, "attention_bias": True}
    weights = {
        name if name == "lm_head.weight" else f"model.{name}": tensor
        for name, tensor in published_weights(config).items()
    }
    return write(path, config, weights), config


def speculators(path: Path) -> tuple[Path, dict[str, Any]]:
    """Nested, one norm before fc, Qwen3's layer, a window."""
    flat = FLAT | {"model_type": "qwen3", "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
                   "sliding_window": 6, "use_sliding_window": True, "layer_types": ["sliding_attention"]}  # fmt: skip
    weights = published_weights(flat)
    return write(path, speculators_config(flat), weights | {"verifier_norm.weight": torch.ones(DIM)}), flat


LAYOUTS = {"safeai": safeai, "specforge": specforge, "vllm": vllm, "speculators": speculators}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_checkpoint_drafts_what_its_own_code_drafts(layout: str, tmp_path: Path) -> None:
    path, config = LAYOUTS[layout](tmp_path)
    drafter = checkpoint.load(str(path), hooks())
    assert isinstance(drafter, eagle.DrafterImpl)
    assert drafter.target_layer_ids == (1, 4, 6)
    num = {"speculators": 4}.get(layout, 7)
    assert drafter.max_draft_tokens == num
    batch, weights = fake_batch(drafter, lengths=(21,)), published_weights(config)
    if layout == "safeai":
        assert drafter.config.rope_theta == 10000.0
    for anchor in (1, 2, 9, 20):
        state = drafter.new_state(1)
        commit_prefix(drafter, state, batch, [anchor], pieces=2)
        (got,) = drafter.propose(state, ask(batch.tokens[:, anchor])).drafts
        tokens, probs = eagle_drafts(hooks(), config, weights, batch, anchor, num=num)
        assert got.tokens == tokens
        assert got.confidence == pytest.approx(probs, abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_checkpoint_is_the_same_after_it_was_saved_as_ours(layout: str, tmp_path: Path) -> None:
    path, _ = LAYOUTS[layout](tmp_path / "theirs")
    want = checkpoint.load(str(path), hooks())
    checkpoint.save(want, tmp_path / "ours", dtype="fp32")
    got = checkpoint.load(str(tmp_path / "ours"), hooks())
    assert got.config == want.config
    assert got.state_dict().keys() == want.state_dict().keys()
    assert all(torch.equal(t, want.state_dict()[name]) for name, t in got.state_dict().items())


@pytest.mark.parametrize(
    ("top", "nested", "taps"),
    [
        (None, None, (1, 4, 6)),  # after 2, N / 2 and N - 3 layers
        ([1, 4, 6], None, (1, 4, 6)),
        ([2, 5, 7], None, (1, 4, 6)),
        (None, [1, 3, 5], (1, 3, 5)),
        ([3, 9, 10], [3, 9, 10], (2, 8, 9)),
    ],
)
def test_taps_are_read_as_outputs_or_as_layers_run_by_their_first(
    top: Any, nested: Any, taps: tuple[int, ...], tmp_path: Path
) -> None:
    config = FLAT | {"eagle_aux_hidden_state_layer_ids": top}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": nested}}
    path = write(tmp_path, config, published_weights(config))
    assert checkpoint.load(str(path), hooks()).target_layer_ids == taps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, which we cannot honour"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"bits": 8}}, "quantization_config is"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"eagle_config": [1]}, "eagle_config is .*expected a table"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is .*only plain rotary"),
        ({"hidden_size": 64}, "hidden_size is 64; target 'fake' has 32"),
        ({"vocab_size": 99}, "vocab_size is 99; target 'fake' has 61"),
        ({"target_hidden_size": 48}, "target_hidden_size is 48"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'; expected a whole number"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; expected a whole number"),
        ({"draft_vocab_size": 99}, "draft_vocab_size is 99; the target has 61"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4]}, "outputs of layers .*-1, 3.*expected distinct ones from 0 to 9"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "expected a list of layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}},
         "which holds"),
        ({"sliding_window": 7}, "window is 7; .*expected more than num_draft_tokens"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is None; expected a whole number"),
        ({"layer_types": 1.5}, r"layer_types is 1\.5; expected a list of names"),
        ({"architectures": 7}, "architectures is 7; expected a list of names"),
        ({"speculators_model_type": "eagle3", "speculators_config": {"proposal_methods": 3}},
         "proposal_methods is 3; expected a list"),
    ],
)  # fmt: skip
def test_what_we_cannot_honour_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, FLAT | changes, published_weights(FLAT))
    with pytest.raises(UserError, match=message):
        checkpoint.load(str(path), hooks())


def test_a_draft_vocabulary_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    weights = published_weights(FLAT)
    write(tmp_path, FLAT, weights | {"t2d": ~weights["t2d"]})
    with pytest.raises(UserError, match="d2t and t2d do not agree"):
        checkpoint.load(str(tmp_path), hooks())
    whole = FLAT | {"draft_vocab_size": VOCAB}
    ids = torch.arange(VOCAB)
    write(tmp_path, whole, published_weights(whole) | {"d2t": ids.flip(0) - ids})
    with pytest.raises(UserError, match="reorders the whole vocabulary"):
        checkpoint.load(str(tmp_path), hooks())
    write(tmp_path, whole, published_weights(whole) | {"d2t": torch.zeros_like(ids)})
    assert "draft_ids" not in checkpoint.load(str(tmp_path), hooks()).state_dict()


@pytest.mark.parametrize("missing", ["fc.weight", "fc_norm.1.weight", "d2t", "lm_head.weight"])
def test_a_missing_tensor_is_named(missing: str, tmp_path: Path) -> None:
    config = FLAT | {"fc_norm": True}
    weights = published_weights(config)
    del weights[missing]
    with pytest.raises(UserError, match=r"missing tensors|expected fc_norm\.0 to fc_norm\.2"):
        checkpoint.load(str(write(tmp_path, config, weights)), hooks())


def test_an_embedding_that_is_not_the_targets_is_refused(tmp_path: Path) -> None:
    other = {"embed_tokens.weight": hooks().embed(torch.arange(VOCAB)).flip(0)}
    with pytest.raises(UserError, match=r"embed_tokens.weight is not the one of target 'fake'"):
        checkpoint.load(str(write(tmp_path, FLAT, published_weights(FLAT) | other)), hooks())


def test_without_a_draft_vocabulary_the_head_is_the_targets(tmp_path: Path) -> None:
    config = {key: value for key, value in FLAT.items() if key != "draft_vocab_size"}
    weights = published_weights(config) | {"lm_head.weight": hooks().head_rows(torch.arange(VOCAB))}
    path = write(tmp_path, config, weights)
    assert "lm_head.weight" not in checkpoint.load(str(path), hooks()).state_dict()


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code in a checkpoint was run",))


@pytest.mark.parametrize("content", [{"fc.weight": Trap()}, [1, 2], {"fc.weight": 3}])
def test_a_pickled_file_gives_tensors_or_nothing(content: Any, tmp_path: Path) -> None:
    write(tmp_path, FLAT, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds"):
        checkpoint.load(str(tmp_path), hooks())
    (tmp_path / "pytorch_model.bin").write_bytes(b"hello, world")  # torch: KeyError 101
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load(str(tmp_path), hooks())
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load(str(tmp_path), hooks())


# --------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    "options",
    [
        {"window": 8},
        {"window": 8, "window_counts_slots": True},
        {"norm_output": False, "norm_before_residual": True, "tap_norm": False, "input_norm": True},
        {"qk_norm": True, "attention_bias": True, "num_taps": 1, "loss": "ce"},
        {"own_head": True},
        {"own_head": True, "draft_vocab_size": 24},
        {"draft_vocab_size": 24, "num_draft_tokens": 7},
        {"num_draft_tokens": 1},
    ],
)
def test_training_is_serving_with_every_option(options: dict[str, Any]) -> None:
    assert_training_is_serving(tiny(**options))


def test_a_step_reads_the_labels_before_it_and_none_after() -> None:
    drafter = tiny()
    batch = replace(random_batch(drafter, (20,)), anchors=torch.tensor([[5]]))
    tokens = batch.tokens.clone()
    tokens[0, 7] = (tokens[0, 7] + 1) % 12
    with torch.no_grad():
        one, two = (drafter(replace(batch, tokens=t)).hidden[0, 0] for t in (batch.tokens, tokens))
    assert torch.equal(one[:2], two[:2])
    assert not torch.allclose(one[2], two[2])


def test_a_step_reads_the_steps_before_it_and_learns_through_them() -> None:
    """The output of the first step is input of all others: as hidden state, and as keys and values."""
    drafter = tiny(loss="ce")
    batch = replace(random_batch(drafter, (20,)), anchors=torch.tensor([[5]]))
    parts: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, out: Tensor) -> None:
        out.retain_grad()
        parts.append(out)

    drafter.midlayer.register_forward_hook(keep)
    drafter(batch).hidden[0, 0, 2].sum().backward()
    grads = [part.grad for part in parts]
    assert len(grads) == 3
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in grads)


@pytest.mark.parametrize("kind", ["ce", "kl"])
@pytest.mark.parametrize("size", [0, 24])
def test_the_loss_of_a_head_of_its_own_is_over_what_it_lists(kind: str, size: int) -> None:
    drafter = tiny(own_head=True, draft_vocab_size=size, loss=kind)
    if size:
        drafter.set_draft_vocab(torch.arange(5, 5 + size))  # tokens 3 and 4 of the text are not listed
    assert drafter.lm_head is not None
    drafter.lm_head.weight.data += torch.randn_like(drafter.lm_head.weight)
    batch = random_batch(drafter, (30, 20), num_anchors=5)
    ids = drafter._head_ids()
    with torch.no_grad():
        out = drafter(batch)
        terms = drafter.loss(out, batch)
        logits = out.hidden @ drafter.lm_head.weight.T
        listed = torch.isin(out.labels, ids) & out.mask
        columns = (out.labels[..., None] == ids).long().argmax(-1)
        ahead = (batch.anchors[..., None] + torch.arange(3)).clamp(max=29)
        final = batch.features[torch.arange(2)[:, None, None], ahead, -1]
        target = (final @ drafter.hooks.head_rows(ids).T).log_softmax(-1)
        loss = F.cross_entropy(logits.flatten(0, 2), columns.flatten(), reduction="none").view_as(columns)
        if kind == "kl":
            loss = (target.exp() * (target - logits.log_softmax(-1))).sum(-1)
    weights = decay_weights(3, 4.48, torch.device("cpu")) * listed
    assert bool((out.mask & ~listed).any()) == bool(size)
    assert float(terms.denominator) == pytest.approx(float(weights.sum()))
    assert float(terms.numerator) == pytest.approx(float((loss * weights).sum()), rel=1e-4)
    right = (ids[logits.argmax(-1)] == out.labels) & listed
    assert terms.metrics["acc@1"] == (float(right[..., 0].sum()), float(out.mask[..., 0].sum()))


def test_published_decay_is_four_fifths_a_step() -> None:
    weights = decay_weights(7, eagle.EagleConfig().gamma, torch.device("cpu"))
    torch.testing.assert_close(weights, 0.8 ** torch.arange(7.0), atol=1e-3, rtol=2e-3)


# ---------------------------------------------------------------------------------------------- serving


def test_as_many_steps_run_as_the_longest_draft_has_tokens() -> None:
    drafter, calls = tiny(num_draft_tokens=7), []
    drafter.midlayer.register_forward_hook(lambda *_: calls.append(1))
    batch = random_batch(drafter, (9, 5))
    state = filled(drafter, batch, (8, 4))
    for num in (1, 4, 7, 99):
        calls.clear()
        ask_all(drafter, state, (0, 1), [4, 5], num)
        assert len(calls) == min(num, 7)


def test_the_first_tokens_pair_is_never_seen_and_every_other_is() -> None:
    """It has no feature before it, so published drafters drop it."""
    drafter = tiny()
    batch = random_batch(drafter, (12,))
    want = stated(ask_all(drafter, filled(drafter, batch, (11,)), [0], [5]))
    for at in range(11):
        tokens = batch.tokens.clone()
        tokens[0, at] += 1
        got = stated(ask_all(drafter, filled(drafter, replace(batch, tokens=tokens), (11,)), [0], [5]))
        assert (got == want) == (at == 0)


def test_the_last_feature_waits_for_its_follower_whatever_that_is() -> None:
    """A rejected draft leaves no trace: the pair is made of the token that came."""
    drafter = tiny()
    batch = random_batch(drafter, (12,))
    state = filled(drafter, batch, (6,))
    ask_all(drafter, state, [0], [int(batch.tokens[0, 6]) + 1])  # an anchor that is not what comes
    rest = Commit(rows=[0], tokens=[batch.tokens[0, 6:11].tolist()], features=batch.features[:, 6:11])
    drafter.commit(state, rest)
    got, want = (ask_all(drafter, s, [0], [5]) for s in (state, filled(drafter, batch, (11,))))
    assert drafts(got) == drafts(want)
    torch.testing.assert_close(stated(got), stated(want))


def test_text_beyond_the_window_and_positions_beyond_it_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, highest = tiny(window=8), 0

    def watched(positions: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        nonlocal highest
        highest = max(highest, int(positions.max()))
        return rope_tables(positions, **options)

    monkeypatch.setattr("hyflash.drafters.context.rope_tables", watched)
    monkeypatch.setattr(eagle, "rope_tables", watched)
    assert drafter.max_positions is None
    batch = random_batch(drafter, (60,))
    tokens, features = batch.tokens.clone(), batch.features.clone()
    tokens[0, :51], features[0, :50] = 4, 1.0
    other = replace(batch, tokens=tokens, features=features)  # the last 8 pairs are the same
    got, want = (ask_all(drafter, filled(drafter, b, (59,), pieces=[7, 9]), [0], [5]) for b in (other, batch))
    assert drafts(got) == drafts(want)
    torch.testing.assert_close(stated(got), stated(want))
    assert highest < 8 + drafter.max_draft_tokens
    short, long = tiny(window=64), tiny()
    got, want = (ask_all(d, filled(d, batch, (59,)), [0], [5]) for d in (short, long))
    assert drafts(got) == drafts(want)


def test_drafts_end_where_positions_do() -> None:
    drafter = tiny(max_positions=12)
    batch = random_batch(drafter, (14,))
    for length, want in ((8, 3), (9, 2), (10, 1), (11, 0), (13, 0)):
        assert len(drafts(ask_all(drafter, filled(drafter, batch, (length,)), [0], [5]))[0]) == want


def test_a_head_of_its_own_drafts_what_it_lists_and_nothing_of_the_context() -> None:
    drafter = tiny(own_head=True, draft_vocab_size=6)
    drafter.set_draft_vocab(torch.arange(20, 26))
    batch = random_batch(drafter, (30, 20))
    rows = drafts(ask_all(drafter, filled(drafter, batch, (29, 19)), (0, 1), [4, 5]))
    assert {token for row in rows for token in row} <= set(range(20, 26))
    assert "words" not in drafter._fixed(1)


def test_a_head_of_its_own_starts_as_the_targets_and_keeps_what_it_learnt(tmp_path: Path) -> None:
    drafter, ids = tiny_drafter("eagle", hooks(), own_head=True, draft_vocab_size=6), torch.arange(20, 26)
    assert isinstance(drafter, eagle.DrafterImpl)
    assert drafter.lm_head is not None
    drafter.set_draft_vocab(ids)
    torch.testing.assert_close(drafter.lm_head.weight.data, hooks().head_rows(ids), atol=0.02, rtol=0.02)
    learnt = drafter.lm_head.weight.data.add_(1.0).clone()
    drafter.set_draft_vocab(ids)
    checkpoint.save(drafter, tmp_path, dtype="fp32")
    assert torch.equal(checkpoint.load(str(tmp_path), hooks()).state_dict()["lm_head.weight"], learnt)


def test_another_store_takes_the_place_of_the_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keeps keys and values sees each committed pair once and says what a draft may attend to."""

    class Blind(GrowingStore):
        """Shows the last two pairs of each row alone."""

        def view(self, rows: list[int], lengths: list[int]) -> Any:
            full = super().view(rows, lengths)
            near = full.positions >= full.anchors[:, None] - 2
            return replace(full, positions=torch.where(near, full.positions, full.anchors[:, None]))

    def build(self: eagle.DrafterImpl, num_rows: int) -> ContextStore:
        return Blind(self._shape(), num_rows)

    narrow, batch = tiny(window=2), random_batch(tiny(), (20, 12))
    want = ask_all(narrow, filled(narrow, batch, (19, 11)), (0, 1), [5, 6])
    monkeypatch.setattr(eagle.DrafterImpl, "_new_store", build)
    full: Drafter = tiny()
    got = ask_all(full, filled(full, batch, (19, 11)), (0, 1), [5, 6])
    assert drafts(got) == drafts(want)
    torch.testing.assert_close(stated(got), stated(want), atol=1e-4, rtol=1e-3)


def test_a_chain_grows_by_a_step_and_masks_each_step_by_its_own_row() -> None:
    """With a window that counts the step itself, the far end moves on with every step."""
    layer = eagle_layer.PairAttention(8, num_heads=2, num_kv_heads=1, head_dim=4, eps=1e-6, bias=False, qk_norm=False)
    cos, sin = rope_tables(torch.arange(3, 5)[None, None], dim=4, theta=100.0)
    mask = torch.tensor([[True, True, True], [False, False, False]])[None, None]
    chain = eagle_layer.Chain(keys=torch.randn(1, 3, 1, 4), values=torch.randn(1, 3, 1, 4), mask=mask, cos=cos, sin=sin)
    pairs = torch.randn(1, 1, 16)
    with torch.no_grad():
        layer.step(pairs, chain)
        got = layer.step(pairs, chain)
        value = layer.keys_values(pairs)[1]  # both steps have the same value, and nothing else is visible
        want = layer.o_proj(value.repeat(1, 1, 2, 1).flatten(2))
    assert len(chain.own_keys) == 2
    torch.testing.assert_close(got, want)
