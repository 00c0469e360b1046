"""DFlash: training and serving agree, context rules hold, losses and the ridge start do what they say."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from block_fakes import DIM, LAYERS, VOCAB, ask, commit_prefix, commit_rows, fake_batch, fake_hooks
from drafting import drafts, num_drafted
from hyflash.core import Commit, DraftRequest, TrainBatch
from hyflash.drafters.block_config import DFlashConfig, unused_token
from hyflash.drafters.dflash import DrafterImpl
from hyflash.drafters.feature_config import tap_rule
from hyflash.errors import HyflashError, UserError

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 5},
    "window_counts_slots": {"window": 6, "window_counts_slots": True},
    "causal": {"window": 5, "causal_block": True},
    "mixed": {"num_layers": 3, "window": 5, "causal_block": True, "full_layers": (1,)},
    "ridge": {"start": "ridge"},
    "ridge_low_rank": {"start": "ridge", "start_rank": 4, "window": 7},
    "plain": {"tap_norm": False, "num_layers": 1, "attention_bias": True},
}


def build(seed: int = 0, **options: Any) -> DrafterImpl:
    torch.manual_seed(seed)
    config = DFlashConfig(**{"num_layers": 2, "num_draft_tokens": 3, "num_taps": 2, **options})
    drafter = DrafterImpl(config, fake_hooks())
    with torch.no_grad():  # random everywhere, so that nothing agrees because it is zero or one
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter.eval()


def serving_hidden(drafter: DrafterImpl, batch: TrainBatch, anchor: int, pieces: int) -> torch.Tensor:
    state = drafter.new_state(len(batch.tokens))
    at = [min(anchor, int(n) - 1) for n in batch.lengths]
    commit_prefix(drafter, state, batch, at, pieces=pieces)
    return drafter.block_hidden(state, ask(batch.tokens[torch.arange(len(at)), at]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lengths", [(23,), (23, 4, 11)])
def test_training_forward_is_the_serving_proposal(variant: str, lengths: tuple[int, ...]) -> None:
    drafter = build(**VARIANTS[variant])
    batch = fake_batch(drafter, lengths=lengths, pad=3)
    for anchor, pieces in ((0, 1), (1, 1), (6, 3), (22, 1), (22, 5)):
        at = torch.clamp(batch.lengths - 1, max=anchor)
        out = drafter(replace(batch, anchors=at[:, None].expand(-1, 2), anchor_mask=batch.anchor_mask[:, :2]))
        served = serving_hidden(drafter, batch, anchor, pieces)
        torch.testing.assert_close(served, out.hidden[:, 0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(served, out.hidden[:, 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_at_or_after_the_anchor_reaches_the_block(variant: str) -> None:
    drafter = build(**VARIANTS[variant])
    batch = fake_batch(drafter, lengths=(20,))
    anchors = torch.tensor([[4, 9, 13]])
    batch = replace(batch, anchors=anchors, anchor_mask=anchors > 0, weights=torch.ones(1, 3))
    before = drafter(batch).hidden
    features, tokens = batch.features.clone(), batch.tokens.clone()
    features[:, 9:] = torch.randn_like(features[:, 9:])
    tokens[:, 10:] = 1
    after = drafter(replace(batch, features=features, tokens=tokens)).hidden
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.allclose(before[:, 2], after[:, 2])
    tokens[0, 9] = (tokens[0, 9] + 1) % VOCAB  # the anchor itself counts, through its embedding
    assert not torch.allclose(drafter(replace(batch, tokens=tokens)).hidden[:, 1], before[:, 1])


def test_window_hides_older_tokens_and_full_context_does_not() -> None:
    for window, hidden_from_block in ((5, True), (0, False)):
        drafter = build(window=window)
        batch = fake_batch(drafter, lengths=(30,))
        batch = replace(batch, anchors=torch.tensor([[25, 29]]), anchor_mask=torch.ones(1, 2, dtype=torch.bool))
        features = batch.features.clone()
        features[:, :20] = torch.randn_like(features[:, :20])
        same = torch.equal(drafter(batch).hidden, drafter(replace(batch, features=features)).hidden)
        assert same is hidden_from_block


def test_window_as_long_as_the_context_is_full_attention() -> None:
    full, windowed = build(), build(window=40)
    windowed.load_state_dict(full.state_dict())
    batch = fake_batch(full, lengths=(40, 9))
    torch.testing.assert_close(windowed(batch).hidden, full(batch).hidden, atol=1e-6, rtol=1e-6)
    a, b = (serving_hidden(d, batch, 39, 2) for d in (full, windowed))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_masked_anchors_and_labels_do_not_count() -> None:
    drafter = build()
    batch = fake_batch(drafter, lengths=(12,), anchors=4, first_answer=6)
    anchors = torch.tensor([[2, 5, 10, 11]])
    out = drafter(replace(batch, anchors=anchors))
    assert out.mask[0].tolist() == [[False] * 3, [True] * 3, [True, False, False], [False] * 3]
    assert out.labels[0, 1].tolist() == batch.tokens[0, 6:9].tolist()
    gap = batch.loss_mask.clone()
    gap[0, 7] = False
    assert drafter(replace(batch, anchors=anchors, loss_mask=gap)).mask[0, 1].tolist() == [True, False, False]


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 16}, {"loss": "ce_tv"}, {"loss": "kl", "dpace": True}])
@pytest.mark.parametrize("start", ["none", "ridge"])
def test_padding_does_not_change_loss_or_gradients(options: dict[str, Any], start: str) -> None:
    drafter = build(correction="gru", correction_width=8, correction_rank=8, start=start, **options)
    batch = fake_batch(drafter, lengths=(17, 9))
    terms = drafter.loss(drafter(batch), batch)
    terms.numerator.backward()
    grads = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    assert grads
    assert all(g.isfinite().all() for g in grads.values())
    drafter.zero_grad()

    wide = fake_batch(drafter, lengths=(17, 9, 0), pad=8)
    wide = replace(
        wide,
        tokens=torch.nn.functional.pad(batch.tokens, (0, 8, 0, 1)),
        features=torch.nn.functional.pad(batch.features, (0, 0, 0, 0, 0, 8, 0, 1)),
        anchors=torch.nn.functional.pad(batch.anchors, (0, 0, 0, 1)),
    )
    padded = drafter.loss(drafter(wide), wide)
    torch.testing.assert_close(padded.numerator, terms.numerator, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(padded.denominator, terms.denominator, atol=1e-6, rtol=1e-6)
    assert padded.metrics == terms.metrics
    padded.numerator.backward()
    for name, parameter in drafter.named_parameters():
        if name in grads:
            torch.testing.assert_close(parameter.grad, grads[name], atol=1e-5, rtol=1e-4)


def test_a_batch_of_padding_alone_gives_zero_loss_and_finite_gradients() -> None:
    drafter = build()
    batch = fake_batch(drafter, lengths=(0, 0), pad=4)
    terms = drafter.loss(drafter(batch), batch)
    terms.numerator.backward()
    assert float(terms.numerator.detach()) == 0.0
    assert float(terms.denominator) == 0.0
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in drafter.parameters())


def test_loss_is_the_weighted_cross_entropy_of_the_labels() -> None:
    drafter = build(gamma=2.0)
    batch = fake_batch(drafter, lengths=(14,))
    batch = replace(batch, weights=torch.rand(1, 6))
    out = drafter(batch)
    terms = drafter.loss(out, batch)
    log_probs = drafter.hooks.head(out.hidden).log_softmax(-1).gather(-1, out.labels[..., None])[..., 0]
    weights = torch.exp(-torch.arange(3) / 2.0) * batch.weights[..., None] * out.mask
    torch.testing.assert_close(terms.numerator, -(log_probs * weights).sum())
    torch.testing.assert_close(terms.denominator, weights.sum())
    hits = (drafter.hooks.head(out.hidden).argmax(-1) == out.labels) & out.mask
    assert terms.metrics["acc@1"] == (float(hits[..., 0].sum()), float(out.mask[..., 0].sum()))
    runs = hits.long().cumprod(-1).sum(-1)[out.mask[..., 0]]
    assert terms.metrics["tau"] == (float((1 + runs).sum()), float(len(runs)))


@pytest.mark.parametrize("options", [{}, {"window": 8, "correction": "gru", "draft_vocab_size": VOCAB}])
def test_overfitted_drafter_serves_its_labels(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = DFlashConfig(num_layers=1, num_draft_tokens=3, num_taps=2, correction_width=16, **options)
    drafter = DrafterImpl(config, fake_hooks())
    batch = fake_batch(drafter, lengths=(24, 24, 20, 15), anchors=1)
    anchors = torch.arange(1, 24)[None].expand(4, -1)
    batch = replace(batch, anchors=anchors, anchor_mask=anchors < batch.lengths[:, None] - 1, weights=torch.ones(4, 23))
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(150):
        optimiser.zero_grad()
        terms = drafter.loss(drafter(batch), batch)
        (terms.numerator / terms.denominator).backward()
        optimiser.step()
    for k in (1, 2, 3):
        right, total = terms.metrics[f"acc@{k}"]
        assert right / total >= 0.99
    drafter.eval()
    for anchor in (1, 7, 11):
        state = drafter.new_state(4)
        commit_prefix(drafter, state, batch, [anchor] * 4)
        got = drafts(drafter.propose(state, ask(batch.tokens[:, anchor])))
        assert got == batch.tokens[:, anchor + 1 : anchor + 4].tolist()
        assert got != batch.tokens[:, anchor : anchor + 3].tolist()  # a shifted label would do this


@pytest.mark.parametrize("window", [0, 16])
def test_state_bytes_are_what_cost_says(window: int) -> None:
    drafter = build(window=window, start="ridge", draft_vocab_size=16)
    batch = fake_batch(drafter, lengths=(600,), anchors=1)
    state = drafter.new_state(2)
    seen = []
    for stop in (0, 1, 15, 16, 17, 512, 600):
        state.reset(0)
        if stop:
            commit_prefix(drafter, state, batch, [stop])
        cost = drafter.cost(stop)
        assert state.nbytes(0) == cost.total_bytes(stop)
        seen.append(state.nbytes(0))
    assert (len(set(seen)) == 1) is bool(window)
    assert cost.propose_flops > 0
    assert cost.weight_bytes >= sum(p.nbytes for p in drafter.parameters())


def tensors(state: Any, rows: int) -> list[torch.Tensor]:
    out = []
    for row in range(rows):
        saved = state.snapshot(row)
        out += [torch.tensor(saved["length"]), *saved["stores"], *saved["fixed"].values()]
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_propose_leaves_the_state_and_snapshots_restore_it_bit_for_bit(variant: str) -> None:
    drafter = build(**VARIANTS[variant], correction="markov", draft_vocab_size=20)
    batch = fake_batch(drafter, lengths=(23, 14))
    state = drafter.new_state(2)
    commit_prefix(drafter, state, batch, [12, 9])
    before = tensors(state, 2)
    request = ask(batch.tokens[[0, 1], [12, 9]])
    first = drafter.propose(state, request)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(state, 2), strict=True))
    saved = state.snapshot(1)
    commit_rows(drafter, state, batch, [(12, 12), (9, 14)])
    state.restore(1, saved)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(state, 2), strict=True))
    assert drafter.propose(state, request) == first
    state.reset(1)
    assert all(not t.any() for t in tensors(state, 2)[len(before) // 2 :])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_in_a_batch_is_the_row_alone(variant: str) -> None:
    drafter = build(**VARIANTS[variant], correction="gru", draft_vocab_size=20)
    batch = fake_batch(drafter, lengths=(23, 14, 3))
    at = [20, 9, 0]
    state = drafter.new_state(3)
    commit_prefix(drafter, state, batch, at, pieces=4)
    anchors = batch.tokens[torch.arange(3), at].tolist()
    together = drafter.propose(state, DraftRequest(rows=(0, 1, 2), anchors=anchors, num_tokens=(3, 2, 64)))
    assert num_drafted(together) == [3, 2, 3]
    for row, num in enumerate((3, 2, 3)):
        request = DraftRequest(rows=[row], anchors=[anchors[row]], num_tokens=[num])
        (alone,) = drafter.propose(state, request).drafts
        assert together.drafts[row].tokens == alone.tokens
        torch.testing.assert_close(together.drafts[row].confidence, alone.confidence, atol=1e-5, rtol=1.3e-6)


def test_reduced_vocabulary_offers_the_list_the_context_and_the_anchor() -> None:
    drafter = build(draft_vocab_size=4)
    drafter.set_draft_vocab(torch.tensor([50, 3, 9, 27]))
    batch = fake_batch(drafter, lengths=(9, 9))
    state = drafter.new_state(2)
    commit_prefix(drafter, state, batch, [5, 2])
    request = ask([33, 41])
    head = drafter._serving_head(state, request)
    assert head.ids is not None
    assert head.allowed is not None
    for row, (stop, anchor) in enumerate(((5, 33), (2, 41))):
        offered = set(head.ids[head.allowed[row]].tolist())
        assert offered == {50, 3, 9, 27, anchor, *batch.tokens[row, :stop].tolist()}
        hidden = drafter.block_hidden(state, request)
        allowed = torch.tensor(sorted(offered))
        want = allowed[drafter.hooks.head(hidden)[row][:, allowed].argmax(-1)]
        assert drafter.propose(state, request).drafts[row].tokens == want.tolist()


def test_static_vocabulary_must_be_distinct_known_tokens_of_the_right_number() -> None:
    drafter = build(draft_vocab_size=3)
    for bad in ([1, 1, 2], [1, 2], [1, 2, VOCAB], [-1, 2, 3]):
        with pytest.raises(UserError, match="3 distinct token ids"):
            drafter.set_draft_vocab(torch.tensor(bad))
    with pytest.raises(UserError, match="full vocabulary"):
        build().set_draft_vocab(torch.tensor([1]))


def test_nan_features_end_the_proposal_and_a_reset_heals_the_row() -> None:
    for window in (0, 5):
        drafter = build(window=window, start="ridge", draft_vocab_size=8)
        batch = fake_batch(drafter, lengths=(9, 9))
        clean = drafter.new_state(2)
        commit_prefix(drafter, clean, batch, [4, 4])
        request = ask(batch.tokens[:, 4])
        want = drafter.propose(clean, request)
        features = batch.features.clone()
        features[0, 3] = math.nan
        state = drafter.new_state(2)
        commit_prefix(drafter, state, replace(batch, features=features), [4, 4])
        got = drafter.propose(state, request)
        assert num_drafted(got) == [0, 3]
        assert got.num_nonfinite == 1
        assert drafts(got)[1] == drafts(want)[1]
        state.reset(0)
        commit_rows(drafter, state, batch, [(0, 4), (4, 4)])
        assert drafts(drafter.propose(state, request)) == drafts(want)


def test_huge_features_are_clamped() -> None:
    drafter = build(tap_norm=False)
    batch = fake_batch(drafter, lengths=(8,))
    huge = replace(batch, features=batch.features * 1e30)
    assert drafter(huge).hidden.isfinite().all()
    assert float(drafter._clean(huge.features).abs().max()) == 65504.0


def test_empty_requests_and_commits_change_nothing() -> None:
    drafter = build()
    state = drafter.new_state(1)
    features = torch.zeros(1, 0, len(drafter.target_layer_ids), DIM)
    drafter.commit(state, Commit(rows=[0], tokens=[[]], features=features))
    drafter.commit(state, Commit(rows=[], tokens=[], features=features[:0]))
    assert state.lengths == [0]
    assert drafter.propose(state, ask([])).drafts == []
    assert num_drafted(drafter.propose(state, ask([5]))) == [3]


def test_drafts_stop_where_positions_end() -> None:
    drafter = build(max_positions=8)
    batch = fake_batch(drafter, lengths=(9,))
    for length, room in ((4, 3), (5, 2), (6, 1), (7, 0), (8, 0)):
        state = drafter.new_state(1)
        commit_prefix(drafter, state, batch, [length])
        assert num_drafted(drafter.propose(state, ask([5]))) == [room]
    assert build(window=4, max_positions=8).max_positions is None


def test_commit_without_features_is_refused() -> None:
    drafter = build()
    commit = Commit(rows=[0], tokens=[[1]], features=None)
    with pytest.raises(HyflashError, match="needs features of layers"):
        drafter.commit(drafter.new_state(1), commit)


def test_ridge_start_recovers_a_linear_target_and_step_zero_is_the_ridge() -> None:
    torch.manual_seed(0)
    for rank in (0, 48):
        config = DFlashConfig(
            num_layers=2, num_draft_tokens=2, num_taps=2, start="ridge", start_rank=rank, start_lambda=1e-9
        )
        drafter = DrafterImpl(config, fake_hooks()).eval()
        assert drafter.target_layer_ids == (0, 1, LAYERS)
        assert drafter.config.final_norm is False
        batch = fake_batch(drafter, lengths=(400,), anchors=1)
        final = drafter.target_layer_ids.index(LAYERS)
        mix = torch.randn(DIM, DIM) / DIM**0.5
        rms = torch.nn.functional.rms_norm
        features = batch.features.clone()
        shifted = rms(features[:, :-1, 1], (DIM,))  # the last ordinary tap decides the final hidden one step later
        features[:, 1:, final] = shifted @ mix.T
        anchors = torch.arange(1, 398)[None]
        batch = replace(batch, features=features, anchors=anchors, anchor_mask=anchors > 0, weights=torch.ones(1, 397))
        figures = drafter.start([batch])
        assert figures["start_rows"] == 397
        hidden = drafter(batch).hidden.detach()
        error = (hidden[:, :, 0] - features[:, 1:398, final]).square().mean()
        assert float(error) < (0.05 if rank else 1e-6)  # the second slot's noise takes some of 48 directions
        assert drafter.ridge is not None
        direct = drafter.ridge(
            drafter._before(drafter._clean(features), anchors), drafter._embed(batch.tokens[:, 1:398])
        )
        assert torch.equal(hidden, direct)


def test_ridge_start_lowers_the_loss_and_needs_whole_blocks() -> None:
    drafter = DrafterImpl(DFlashConfig(num_layers=1, num_draft_tokens=2, num_taps=2, start="ridge"), fake_hooks())
    short = fake_batch(drafter, lengths=(2,))
    with pytest.raises(UserError, match="no anchor with 2 tokens"):
        drafter.start([short])
    assert build().start([short]) == {}


def test_bfloat16_autocast_trains() -> None:
    drafter = build(start="ridge", correction="gru", draft_vocab_size=16, loss="ce_tv").train()
    batch = fake_batch(drafter, lengths=(17, 9))
    plain = drafter.loss(drafter(batch), batch)
    with torch.autocast("cpu", torch.bfloat16):
        terms = drafter.loss(drafter(batch), batch)
    terms.numerator.backward()
    assert terms.numerator.dtype == torch.float32
    torch.testing.assert_close(terms.numerator, plain.numerator, rtol=0.1, atol=0)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in drafter.parameters())


@pytest.mark.parametrize("correction", ["none", "markov", "gru"])
def test_half_precision_weights_serve_with_half_the_state(correction: str) -> None:
    options: dict[str, Any] = {"start": "ridge", "correction": correction, "window": 5, "draft_vocab_size": 30}
    drafter, half = build(**options), build(**options).bfloat16()
    batch = fake_batch(drafter, lengths=(9,))
    hidden = []
    for each in (drafter, half):
        state = each.new_state(1)
        commit_prefix(each, state, batch, [7])
        hidden.append(each.block_hidden(state, ask(batch.tokens[:, 7])).float())
        assert num_drafted(each.propose(state, ask(batch.tokens[:, 7]))) == [3]
        assert state.nbytes(0) == each.cost(7).state_bytes
    torch.testing.assert_close(hidden[0], hidden[1], atol=0.2, rtol=0.1)
    assert half.cost(7).state_bytes < drafter.cost(7).state_bytes


@pytest.mark.parametrize("vocab", [0, 30])
def test_a_drafter_runs_beside_a_target_in_half_precision(vocab: int) -> None:
    config = DFlashConfig(num_layers=1, num_draft_tokens=3, draft_vocab_size=vocab, start="ridge", loss="kl")
    drafter = DrafterImpl(config, fake_hooks(dtype=torch.bfloat16))
    batch = fake_batch(drafter, lengths=(17,), anchors=3)
    drafter.start([replace(batch, anchors=torch.tensor([[2, 5, 9]]))])
    drafter.loss(drafter(batch), batch).numerator.backward()
    state = drafter.new_state(1)
    commit_prefix(drafter, state, batch, [7])
    assert num_drafted(drafter.propose(state, ask(batch.tokens[:, 7]))) == [3]


def test_a_reduced_head_keeps_the_scale_and_bias_of_the_targets_head() -> None:
    hooks = fake_hooks()
    bias = torch.linspace(-20, 20, VOCAB)
    scaled = replace(hooks, head=lambda h: 0.125 * hooks.head(h) + bias)
    drafter = DrafterImpl(DFlashConfig.tiny().model_copy(update={"draft_vocab_size": VOCAB}), scaled)
    batch = fake_batch(drafter, lengths=(17,))
    out = drafter(batch)
    want = DrafterImpl(DFlashConfig.tiny(), scaled).loss(out, batch)
    torch.testing.assert_close(drafter.loss(out, batch).numerator, want.numerator)
    request = ask([5])
    state = drafter.new_state(1)
    logits = drafter._serving_head(state, request).logits(drafter.block_hidden(state, request))
    torch.testing.assert_close(logits, scaled.head(drafter.block_hidden(state, request)), atol=1e-4, rtol=1e-4)


def test_a_copied_drafter_is_independent_of_the_first() -> None:
    first = build(draft_vocab_size=2)
    first.propose(first.new_state(1), ask([40]))
    second = copy.deepcopy(first)
    second.set_draft_vocab(torch.tensor([50, 51]))
    state = second.new_state(1)
    assert set(drafts(second.propose(state, ask([40])))[0]) <= {40, 50, 51}
    first.load_state_dict(second.state_dict())
    assert set(drafts(first.propose(state, ask([40])))[0]) <= {40, 50, 51}


def test_half_precision_features_are_read() -> None:
    drafter = build()
    batch = fake_batch(drafter, lengths=(9,))
    half = replace(batch, features=batch.features.half())
    torch.testing.assert_close(drafter(half).hidden, drafter(batch).hidden, atol=2e-2, rtol=2e-2)


def test_tap_rule_is_the_published_one() -> None:
    assert tap_rule(36, 5) == (1, 9, 17, 25, 33)
    assert tap_rule(64, 5) == (1, 16, 31, 46, 61)
    assert tap_rule(30, 5) == (1, 8, 14, 20, 27)
    assert tap_rule(30, 1) == (15,)
    assert tap_rule(2, 5) == (0, 1)
    assert tap_rule(1, 5) == (0,)


def test_mask_token_is_the_last_usable_one() -> None:
    assert unused_token(fake_hooks()) == VOCAB - 1
    assert unused_token(fake_hooks(eos_token_ids=(VOCAB - 1, VOCAB - 2))) == VOCAB - 3
    hooks = fake_hooks()
    embedding = hooks.embed(torch.arange(VOCAB)).clone()
    embedding[-1] = 0
    assert unused_token(replace(hooks, embed=lambda t: embedding[t])) == VOCAB - 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64; expected 32"),
        ({"num_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 5}, "even number"),
        ({"target_layer_ids": (0, 3)}, "distinct layers from 0 to 2"),
        ({"target_layer_ids": (1, 1)}, "distinct layers"),
        ({"target_layer_ids": (0, 1), "start": "ridge"}, "need 2"),
        ({"target_layer_ids": (0, 1), "loss": "kl"}, "need 2"),
        ({"start_taps": (1,)}, "need start=ridge"),
        ({"start": "ridge", "start_taps": (7,)}, "expected some of target_layer_ids"),
        ({"start": "ridge", "final_norm": True}, "final_norm must be off"),
        ({"start": "ridge", "start_rank": 97}, "start_rank is 97; expected at most 96"),
        ({"mask_token_id": 0}, "does not end texts"),
        ({"mask_token_id": VOCAB}, "reserved token below"),
        ({"draft_vocab_size": VOCAB + 1}, "the target has 61 tokens"),
        ({"full_layers": (0,)}, "needs a window"),
        ({"full_layers": (9,), "window": 4}, "layers below 2"),
        ({"window_counts_slots": True}, "needs a window"),
        ({"window_counts_slots": True, "window": 3}, "more than num_draft_tokens"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(**options)
