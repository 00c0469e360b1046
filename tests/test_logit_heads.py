"""Heads that add to the logits (Domino, DSpark): published checkpoints, backbones, losses, vocabularies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from block_fakes import DIM, VOCAB, ask, commit_prefix, fake_batch, fake_hooks
from drafting import ask as ask_all
from drafting import assert_training_is_serving, drafts, filled, random_batch, tiny_drafter
from hyflash import checkpoint
from hyflash.core import TargetHooks
from hyflash.drafters import dflash, domino, dspark
from hyflash.drafters.base import Drafter
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.confidence import ConfidenceHead
from hyflash.drafters.logit_drafter import LogitDrafter
from hyflash.errors import UserError
from hyflash.ops.losses import decay_weights
from published import domino_drafts, dspark_drafts, zlab_reference

HYFLASH = {"window": 8, "memory_core": "delta"}
KINDS = [
    ("domino", {"sample_from_anchor": False}),
    ("domino", {"pure_draft_prefix_len": 0, **HYFLASH}),
    ("domino", {"start": "ridge", "draft_vocab_size": 24, "num_draft_tokens": 5}),
    ("domino", {"num_draft_tokens": 1}),
    ("dspark", {"sample_from_anchor": False, "markov": "gated"}),
    ("dspark", {"markov": "rnn", **HYFLASH, "draft_vocab_size": 24}),
    ("dspark", {"markov": "none", "confidence_with_markov": False, "start": "ridge"}),
    ("dspark", {"markov": "gated", "confidence_head": False, "draft_vocab_size": 24}),
]


def hooks() -> TargetHooks:
    return fake_hooks(num_layers=8)


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_training_is_serving_on_either_backbone_and_vocabulary(name: str, options: dict[str, Any]) -> None:
    drafter = tiny_drafter(name, hooks(), **options)
    drafter.requires_grad_(False)
    if isinstance(drafter, LogitDrafter):
        drafter._logit_table().mul_(20.0)  # so that the head decides
    assert_training_is_serving(drafter)


@pytest.mark.parametrize("name", ["domino", "dspark"])
def test_a_fresh_head_leaves_the_backbone_as_it_is(name: str) -> None:
    drafter = checkpoint.load(name, hooks())
    plain = dflash.DrafterImpl(
        DFlashConfig(sample_from_anchor=True, target_layer_ids=drafter.target_layer_ids), hooks()
    )
    plain.load_state_dict(drafter.state_dict(), strict=False)
    batch = random_batch(drafter, (9, 20))
    got, want = (ask_all(d, filled(d, batch, (8, 19)), range(2), [5, 7]) for d in (drafter, plain.eval()))
    assert drafts(got) == drafts(want)


@pytest.mark.parametrize("name", ["domino", "dspark"])
def test_the_head_depends_on_the_drafts_before_a_position(name: str) -> None:
    drafter = tiny_drafter(name, hooks())
    batch = random_batch(drafter, (20,))
    tokens = batch.tokens.clone()
    tokens[0, 6] = (tokens[0, 6] + 1) % 12
    with torch.no_grad():
        one, two = (
            drafter.logits(drafter(replace(batch, tokens=t, anchors=torch.tensor([[5]]))))
            for t in (tokens, batch.tokens)
        )
    assert torch.equal(one[0, 0, 0], two[0, 0, 0])
    assert not torch.allclose(one[0, 0, 1], two[0, 0, 1])


@pytest.mark.parametrize(("pure", "corrected"), [(0, [0, 1, 2]), (1, [1, 2]), (3, [])])
def test_domino_corrects_from_the_first_slot_that_is_not_pure(pure: int, corrected: list[int]) -> None:
    drafter = tiny_drafter("domino", hooks(), pure_draft_prefix_len=pure)
    out = drafter(random_batch(drafter, (20,), num_anchors=3))
    moved = (out.extra["latent"] != 0).flatten(0, 1).any(-1).any(0)
    assert moved.nonzero()[:, 0].tolist() == corrected


def test_a_broken_head_leaves_the_drafts_it_does_not_touch() -> None:
    drafter = tiny_drafter("domino", hooks())
    batch = random_batch(drafter, (9,))
    want = drafts(ask_all(drafter, filled(drafter, batch, (8,)), [0], [5]))
    for parameter in drafter.get_submodule("prefix_gru").parameters():
        parameter.data.fill_(torch.nan)
    got = ask_all(drafter, filled(drafter, batch, (8,)), [0], [5])
    assert drafts(got) == [want[0][:1]]
    assert got.num_nonfinite == 1


def test_another_correction_beside_the_head_is_refused() -> None:
    with pytest.raises(UserError, match="correction is 'gru'; expected none"):
        tiny_drafter("domino", hooks(), correction="gru")
    with pytest.raises(UserError, match="needs a markov head"):
        tiny_drafter("dspark", hooks(), markov="none")


# ----------------------------------------------------------------------------------------------- losses


def cross_entropy(drafter: Drafter, logits: torch.Tensor, out: Any) -> float:
    """Decayed mean over labelled positions."""
    ce = F.cross_entropy(logits.flatten(0, 2), out.labels.flatten(), reduction="none").view_as(out.labels)
    weights = decay_weights(out.labels.shape[-1], 4.0, torch.device("cpu")) * out.mask
    return float((ce * weights).sum() / weights.sum())


@pytest.mark.parametrize(
    ("fade", "progress", "share"), [(1, 0, 1), (1, 0.25, 0.75), (1, 1, 0), (0.5, 0.25, 0.5), (0, 0, 0)]
)
def test_dominos_loss_fades_from_the_uncorrected_logits_to_the_corrected(
    fade: float, progress: float, share: float
) -> None:
    drafter = tiny_drafter("domino", hooks(), base_decay=fade)
    batch = replace(random_batch(drafter, (30, 20), num_anchors=5), progress=progress)
    with torch.no_grad():
        out = drafter(batch)
        base, final = (cross_entropy(drafter, x, out) for x in (drafter.hooks.head(out.hidden), drafter.logits(out)))
        terms = drafter.loss(out, batch)
    assert base != pytest.approx(final)
    assert float(terms.numerator / terms.denominator) == pytest.approx(share * base + (1 - share) * final, rel=1e-4)


def test_dsparks_confidence_learns_the_overlap_of_both_distributions() -> None:
    drafter = tiny_drafter("dspark", hooks())
    assert isinstance(drafter, dspark.DrafterImpl)
    batch = random_batch(drafter, (30, 20), num_anchors=5)
    plain = tiny_drafter("dspark", hooks(), confidence_weight=0.0)
    plain.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        out = drafter(batch)
        ahead = batch.anchors[..., None] + torch.arange(3)
        final = batch.features[torch.arange(2)[:, None, None], ahead.clamp(max=29), -1]
        p, q = drafter.hooks.head(final).softmax(-1), drafter.logits(out).softmax(-1)
        overlap = 1 - 0.5 * (p - q).abs().sum(-1)
        wrong = F.binary_cross_entropy_with_logits(out.extra["confidence"], overlap, reduction="none")
        weights = decay_weights(3, 4.0, torch.device("cpu")) * out.mask
        both, rest = (d.loss(out, batch) for d in (drafter, plain))
    gap = float(both.numerator - rest.numerator)
    assert gap == pytest.approx(float((wrong * weights).sum()), rel=1e-4)
    count = float(out.mask.sum())
    assert both.metrics["overlap"] == pytest.approx((float(overlap[out.mask].sum()), count), rel=1e-4)
    assert "overlap" not in rest.metrics


# -------------------------------------------------------------------------------------------- published


def published(path: Path, head: dict[str, tuple[int, ...]], *, nested: dict[str, Any], **top: Any) -> Path:
    """A checkpoint in a published layout: one layer of DFlash, and a head of random tensors."""
    torch.manual_seed(3)
    plain = dflash.DrafterImpl(DFlashConfig(num_layers=1, num_draft_tokens=3, num_taps=2, tap_norm=False), hooks())
    checkpoint.save(plain, path, dtype="fp32")
    config = json.loads((path / "config.json").read_text())
    del config["hyflash"]
    config["dflash_config"] |= nested
    (path / "config.json").write_text(json.dumps({**config, **top}))
    tensors = {name: value + 0.2 * torch.randn_like(value) for name, value in plain.state_dict().items()}
    save_file(tensors | {name: 0.7 * torch.randn(size) for name, size in head.items()}, path / "model.safetensors")
    return path


def published_domino(path: Path, *, prefix: str = "", **changes: Any) -> Path:
    head = {"prefix_gru.weight_ih_l0": (21, DIM), "prefix_gru.weight_hh_l0": (21, 7),
            "embed_proj.0.weight": (6, DIM + 7), "embed_proj.2.weight": (VOCAB, 6)}  # fmt: skip
    nested = {"projector_type": "domino", "gru_hidden_dim": 7, "emb_dim": 6, "pure_draft_prefix_len": 1} | changes
    return published(path, {prefix + name: size for name, size in head.items()}, nested=nested, emb_dim=6)


def published_dspark(path: Path, kind: str = "vanilla", *, flat: bool = False, **changes: Any) -> Path:
    """DeepSpec's layout; `flat` has ModelOpt's names."""
    names = ("markov_w1", "markov_w2", "confidence_proj.weight", "confidence_proj.bias") if flat else (
        "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    )  # fmt: skip
    head: dict[str, tuple[int, ...]] = dict(zip(names, [(VOCAB, 5), (VOCAB, 5), (1, DIM + 5), (1,)], strict=True))
    if kind == "gated":
        head |= {"markov_head.gate_proj.weight": (5, DIM + 5), "markov_head.gate_proj.bias": (5,)}
    if kind == "rnn":
        head |= {"markov_head.joint_proj.weight": (15, DIM + 10), "markov_head.joint_proj.bias": (15,)}
    top = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 5, "markov_head_type": kind, "num_anchors": 512,
           "enable_confidence_head": True, "confidence_head_with_markov": True}  # fmt: skip
    return published(path, head, nested={}, **(top | changes))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint._read_weights(path)


@pytest.mark.parametrize(("shift", "pure"), [(True, 1), (False, 1), (True, 0), (False, 2)])
def test_a_published_domino_drafts_what_its_own_code_drafts(shift: bool, pure: int, tmp_path: Path) -> None:
    path = published_domino(tmp_path, shift_label=shift, pure_draft_prefix_len=pure)
    drafter = checkpoint.load(str(path), hooks())
    assert isinstance(drafter, domino.DrafterImpl)
    assert drafter.max_draft_tokens == (4 if shift else 3)
    config, weights = json.loads((path / "config.json").read_text()), tensors_of(path)
    batch = fake_batch(drafter, lengths=(21,))
    for anchor in (1, 9, 20):
        state = drafter.new_state(1)
        commit_prefix(drafter, state, batch, [anchor])
        got = drafter.propose(state, ask(batch.tokens[:, anchor])).drafts[0].tokens
        hidden, token = zlab_reference(hooks(), config, weights, batch, anchor), int(batch.tokens[0, anchor])
        assert got == domino_drafts(hooks(), weights, hidden, token, shift_label=shift, pure=pure)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_published_dspark_drafts_and_states_what_its_own_code_does(kind: str, tmp_path: Path) -> None:
    path = published_dspark(tmp_path, kind)
    drafter = checkpoint.load(str(path), hooks())
    assert isinstance(drafter, dspark.DrafterImpl)
    assert drafter.max_draft_tokens == 4
    config, weights = json.loads((path / "config.json").read_text()), tensors_of(path)
    batch = fake_batch(drafter, lengths=(21,))
    for anchor in (1, 9, 20):
        state = drafter.new_state(1)
        commit_prefix(drafter, state, batch, [anchor])
        (got,) = drafter.propose(state, ask(batch.tokens[:, anchor])).drafts
        hidden, token = zlab_reference(hooks(), config, weights, batch, anchor), int(batch.tokens[0, anchor])
        tokens, stated = dspark_drafts(hooks(), weights, hidden, token, kind=kind)
        assert got.tokens == tokens
        assert got.confidence == pytest.approx(stated, abs=1e-4, rel=1e-4)


def test_the_three_spellings_of_heads_are_one_drafter(tmp_path: Path) -> None:
    for one, two in (
        (published_domino(tmp_path / "a"), published_domino(tmp_path / "b", prefix="logit_head.")),
        (published_dspark(tmp_path / "c"), published_dspark(tmp_path / "d", flat=True)),
    ):
        first, second = (checkpoint.load(str(path), hooks()).state_dict() for path in (one, two))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, True),
        ({"architectures": ["DFlashDraftModel"]}, False),
        ({"architectures": ["DFlashDraftModel"], "shift_label": True}, True),
        ({"sample_from_anchor": False}, False),
    ],
)
def test_whether_the_anchor_drafts_is_read_from_keys_or_the_class(
    changes: dict[str, Any], want: bool, tmp_path: Path
) -> None:
    config = checkpoint.load(str(published_dspark(tmp_path, **changes)), hooks()).config
    assert isinstance(config, dspark.DSparkConfig)
    assert config.sample_from_anchor is want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "fir"}, "markov_head_type is 'fir'; expected vanilla, gated, rnn"),
        ({"markov_rank": "5"}, "markov_rank is '5'; expected a whole number"),
        ({"shift_label": True, "sample_from_anchor": False}, "contradict each other"),
        ({"target_layer_ids": [-1, 5]}, "target_layer_ids is"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type"),
    ],
)
def test_published_heads_we_cannot_honour_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = published_dspark(tmp_path, **changes)
    if "target_layer_ids" in changes:
        config = json.loads((path / "config.json").read_text())
        del config["dflash_config"]["target_layer_ids"]
        (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        checkpoint.load(str(path), hooks())


def test_a_shipped_copy_of_the_targets_embedding_must_be_the_targets(tmp_path: Path) -> None:
    path, ids = published_dspark(tmp_path), torch.arange(VOCAB)
    copies = {"embed_tokens.weight": hooks().embed(ids), "lm_head.weight": hooks().head_rows(ids)}
    save_file(tensors_of(path) | copies, path / "model.safetensors")
    want = checkpoint.load(str(path), hooks()).state_dict()
    assert not {name for name in want if "embed_tokens" in name or "lm_head" in name}
    for name, copy in copies.items():
        save_file(tensors_of(path) | {name: copy.flip(0)}, path / "model.safetensors")
        with pytest.raises(UserError, match=f"tensor {name} is not the one of target 'fake'"):
            checkpoint.load(str(path), hooks())
        save_file(tensors_of(path) | copies, path / "model.safetensors")


def test_a_dflash_becomes_a_domino_or_dspark_whose_head_is_fresh(tmp_path: Path) -> None:
    plain = tiny_drafter("dflash", hooks(), target_layer_ids=(1, 5, 8))
    checkpoint.save(plain, tmp_path, dtype="fp32")
    batch = random_batch(plain, (9,))
    want = ask_all(plain, filled(plain, batch, (8,)), [0], [5])
    for name in ("domino", "dspark"):
        drafter = checkpoint.load(f"{name}:{tmp_path}", hooks())
        assert drafts(ask_all(drafter, filled(drafter, batch, (8,)), [0], [5])) == drafts(want)


def test_confidence_reads_the_token_before_only_where_it_should() -> None:
    for reads in (True, False):
        drafter = tiny_drafter("dspark", hooks(), confidence_with_markov=reads)
        head = drafter.get_submodule("confidence_head")
        assert isinstance(head, ConfidenceHead)
        assert head.proj.in_features == DIM + (4 if reads else 0)
