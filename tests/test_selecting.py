"""dflash2 and dcoco: nothing changes at the start, neighbours count once trained, frozen backbones stay as they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from block_fakes import DIM, VOCAB, ask, commit_prefix, fake_batch, fake_hooks
from drafting import drafts, num_drafted, stated
from hyflash import checkpoint, drafters
from hyflash.core import Proposal, TrainBatch
from hyflash.drafters.base import Drafter
from hyflash.drafters.dcoco import PairCorrector
from hyflash.drafters.selecting import SelectingDrafter
from hyflash.errors import UserError
from hyflash.train.optim import freeze, group_names

METHODS = ["dflash2", "dcoco"]
SMALL: dict[str, Any] = {"num_layers": 2, "num_draft_tokens": 4, "num_taps": 2}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "dflash-window-reduced": ("dflash", {"window": 6, "draft_vocab_size": 20}),
    "dflash-gru-ridge": (
        "dflash",
        {"correction": "gru", "correction_width": 8, "correction_rank": 8, "start": "ridge"},
    ),
    "hyflash-reduced": ("hyflash", {"window": 6, "draft_vocab_size": 20}),
}


def build(method: str, *, random: bool = True, **options: Any) -> Drafter:
    """Random everywhere, so that nothing agrees because it is zero or one; or as fresh as it comes."""
    torch.manual_seed(0)
    cls = drafters.load_class(method)
    drafter = cls(cls.Config.parse({**SMALL, **options}, where="test"), fake_hooks())
    if random:
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter.eval()


def proposal(drafter: Drafter, batch: TrainBatch, upto: list[int]) -> Proposal:
    state = drafter.new_state(len(upto))
    commit_prefix(drafter, state, batch, upto)
    return drafter.propose(state, ask(batch.tokens[torch.arange(len(upto)), upto]))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_of_another_method_drafts_the_same_until_it_is_trained(
    method: str, base: str, tmp_path: Path
) -> None:
    name, options = BASES[base]
    old = build(name, **options)
    checkpoint.save(old, tmp_path, dtype="fp32")
    new = checkpoint.load(f"{method}:{tmp_path}", fake_hooks())
    assert isinstance(new, SelectingDrafter)
    old.correction = None  # the selector takes its place
    batch = fake_batch(old, lengths=(30, 9, 17))
    got, want = (proposal(d, batch, [29, 0, 16]) for d in (new, old))
    assert drafts(got) == drafts(want)
    assert num_drafted(got) == [4, 4, 4]
    torch.testing.assert_close(stated(got), stated(want), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(new(batch).hidden, old(batch).hidden, atol=1e-5, rtol=1e-5)


def test_beside_a_checkpoint_options_of_what_it_does_not_have_are_taken(tmp_path: Path) -> None:
    checkpoint.save(build("dflash", correction="markov"), tmp_path)
    options = {"selector_top_k": 3, "candidate_width": 5, "memory_core": "delta"}
    found = checkpoint.load(f"dcoco:{tmp_path}", fake_hooks(), options=options)
    assert {name: getattr(found.config, name) for name in options} == options
    for name, value in {"window": 7, "num_layers": 3, "correction": "none"}.items():
        with pytest.raises(UserError, match=f"says what {name} must be"):
            checkpoint.load(f"dcoco:{tmp_path}", fake_hooks(), options={name: value})
    with pytest.raises(UserError, match="unknown option 'selector_rank'"):
        checkpoint.load(f"dcoco:{tmp_path}", fake_hooks(), options={"selector_rank": 3})


def test_weights_that_learn_are_chosen_by_name() -> None:
    drafter = build("dcoco")
    freeze(drafter, ["candidate_selector.out.*", "*_norm.weight"])
    names = {name for group in group_names(drafter).values() for name in group}
    assert {"candidate_selector.out.weight", "candidate_selector.pair_norm.weight", "hidden_norm.weight"} <= names
    assert not {"fc.weight", "candidate_selector.pair.weight"} & names
    freeze(drafter, [])
    assert all(p.requires_grad for p in drafter.parameters())
    with pytest.raises(UserError, match=r"no weight is called 'selector\.\*'; their names begin with tap_norm, fc"):
        freeze(drafter, ["fc.*", "selector.*"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"memory_core": "gla", "window": 5}])
def test_drafts_with_a_reduced_vocabulary_are_of_the_list_the_context_or_the_anchor(
    method: str, options: dict[str, Any]
) -> None:
    drafter = build(method, draft_vocab_size=16, **options)
    drafter.set_draft_vocab(torch.arange(20, 36))
    batch = fake_batch(drafter, lengths=(12, 3))
    found = proposal(drafter, batch, [11, 2])
    for row, upto in enumerate((11, 2)):
        allowed = {*range(20, 36), *batch.tokens[row, : upto + 1].tolist()}
        assert num_drafted(found)[row] == 4
        assert set(drafts(found)[row]) <= allowed


def successors(drafter: Drafter) -> tuple[TrainBatch, Tensor]:
    """Texts in which each token has one successor, which no feature tells, and the successors (V,)."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    following = torch.empty_like(order)
    following[order] = order.roll(-1)  # one cycle through all tokens
    batch = fake_batch(drafter, lengths=(61, 61), anchors=24)
    tokens = batch.tokens.clone()
    for t in range(1, tokens.shape[1]):
        tokens[:, t] = following[tokens[:, t - 1]]
    return replace(batch, tokens=tokens), following


@pytest.mark.parametrize("method", METHODS)
def test_a_selector_alone_learns_what_follows_what(method: str) -> None:
    width = (
        {"selector_rank": 32} if method == "dflash2" else {"candidate_width": 24, "pair_width": 8, "score_width": 32}
    )
    drafter = build(method, selector_top_k=VOCAB, **width)
    freeze(drafter, ["candidate_selector.*"])
    drafter.train()
    batch, following = successors(drafter)
    optimiser = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=2e-2)
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    for _ in range(40):
        optimiser.zero_grad()
        terms = drafter.loss(drafter(batch), batch)
        (terms.numerator / terms.denominator).backward()
        optimiser.step()
    shares = {name: n / d for name, (n, d) in terms.metrics.items()}
    assert shares["candidate_recall"] == 1.0
    assert shares["base_acc@2"] < 0.2
    assert min(shares[f"acc@{k}"] for k in range(1, 5)) > 0.8
    changed = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.startswith("candidate_selector.")}
    tokens = torch.tensor([row for at in (9, 30, 50) for row in drafts(proposal(drafter.eval(), batch, [at, at]))])
    assert (tokens[:, 1:] == following[tokens[:, :-1]]).float().mean() > 0.8, "neighbours follow one another"


@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_memory_is_trained_over_as_it_serves(method: str) -> None:
    options = {"memory_core": "delta", "window": 6, "memory_dropout": 0.9, "random_window": 1.0}
    drafter = build(method, **options)
    batch = fake_batch(drafter, lengths=(40,))
    with torch.no_grad():
        want = drafter(batch).hidden
    freeze(drafter, ["candidate_selector.*"])
    torch.testing.assert_close(drafter.train()(batch).hidden, want)
    freeze(drafter, [])
    assert not torch.allclose(drafter.train()(batch).hidden, want)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weight", [0.0, 2.5])
def test_the_loss_is_the_backbones_and_the_weighted_selectors(method: str, weight: float) -> None:
    drafter = build(method, selector_loss_weight=weight, gamma=2.0)
    batch = fake_batch(drafter, lengths=(23, 11))
    out = drafter(batch)
    joint = drafter.loss(out, batch)
    logits = drafter.hooks.head(out.hidden)
    position = torch.exp(-torch.arange(4) / 2.0).expand(out.mask.shape) * out.mask
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 2), out.labels.flatten(), reduction="none")
    freeze(drafter, ["candidate_selector.*"])
    alone = drafter.loss(drafter(batch), batch)
    assert float(joint.denominator) == pytest.approx(float(position.sum()))
    want = (ce.view_as(position) * position).sum() + weight * alone.numerator
    torch.testing.assert_close(joint.numerator, want, rtol=1e-4, atol=1e-4)
    recall, labelled = alone.metrics["candidate_recall"]
    assert labelled == float(out.mask.sum())
    top = logits.topk(16, dim=-1).indices
    assert recall == float(((top == out.labels[..., None]).any(-1) & out.mask).sum())
    share = float(alone.denominator) / float(joint.denominator)
    assert share == pytest.approx(1.0) if method == "dcoco" else 0.0 < share < 1.0


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_without_labels_costs_nothing_and_breaks_nothing(method: str) -> None:
    drafter = build(method)
    batch = fake_batch(drafter, lengths=(9,))
    batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    terms = drafter.loss(drafter(batch), batch)
    assert float(terms.denominator) == 0.0
    terms.numerator.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in drafter.parameters())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("dcoco", {"correction": "gru"}, "correction is gru; expected none"),
        ("dflash2", {"correction": "markov"}, "correction is markov; expected none"),
        ("dcoco", {"selector_top_k": VOCAB + 1}, f"selector_top_k is {VOCAB + 1}; expected at most the {VOCAB}"),
        ("dcoco", {"draft_vocab_size": 8}, "selector_top_k is 16; expected at most the 8"),
        ("dflash2", {"conv_group_size": 12}, f"conv_group_size is 12; expected a divisor of the width {DIM}"),
        ("dflash2", {"conv_kernel_size": 6}, "conv_kernel_size is 6; expected at most the 5 slots"),
    ],
)
def test_options_that_do_not_go_together_are_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(method, **options)


# ------------------------------------------------------------------------------------------------ dcoco


@pytest.mark.parametrize(("dim", "count"), [(4096, 2_229_505), (2560, 1_443_073)])
def test_the_corrector_has_as_many_parameters_as_the_published_ones(dim: int, count: int) -> None:
    with torch.device("meta"):
        scorer = PairCorrector(fake_hooks(), dim=dim, candidate_width=128, pair_width=128, score_width=256, eps=1e-6)
    assert sum(p.numel() for p in scorer.parameters()) == count


@torch.no_grad()
def test_a_pair_is_scored_by_the_plain_mlp_of_its_four_parts() -> None:
    drafter = build("dcoco", candidate_width=6, pair_width=5, score_width=7)
    scorer = drafter.candidate_selector
    hidden, ids = torch.randn(2, 3, DIM), torch.randint(0, VOCAB, (2, 3, 4))
    contexts, before, after = scorer.contexts(hidden), scorer.predecessors(ids), scorer.successors(ids.flip(-1))
    got = scorer.score(contexts, before, after)
    for n, t, a, b in [(0, 0, 0, 0), (1, 2, 3, 1), (0, 1, 2, 3)]:
        p, s, c = before[n, t, a], after[n, t, b], contexts[n, t]
        inner = torch.nn.functional.silu(scorer.hidden(torch.cat((p, s, p * s, c))))
        assert float(got[n, t, a, b]) == pytest.approx(float(scorer.out(inner)), rel=1e-4, abs=1e-5)
    moved = hidden.clone()
    moved[:, 0] += 1.0
    changed = (scorer.contexts(moved) - contexts).abs().sum(-1) > 1e-6
    assert changed.tolist() == [[True, True, False]] * 2, "the state is of a slot and the one before it"


@torch.no_grad()
def test_tokens_enter_by_direction_and_not_by_size() -> None:
    drafter = build("dcoco")
    scorer, ids = drafter.candidate_selector, torch.arange(5)
    want = scorer.predecessors(ids), scorer.successors(ids)
    embed, rows = drafter.hooks.embed, drafter.hooks.head_rows
    scorer.hooks = replace(drafter.hooks, embed=lambda t: 50 * embed(t), head_rows=lambda t: 0.02 * rows(t))
    torch.testing.assert_close((scorer.predecessors(ids), scorer.successors(ids)), want, atol=1e-3, rtol=1e-3)


def test_confidence_follows_the_rating_of_the_list() -> None:
    drafter = build("dcoco", random=False)
    batch = fake_batch(drafter, lengths=(12,))
    before = proposal(drafter, batch, [11])
    drafter.candidate_selector.out.bias.data.fill_(math.log(3.0))  # every candidate three times as likely
    after = proposal(drafter, batch, [11])
    assert drafts(after) == drafts(before)
    for more, less in zip(stated(after)[0], stated(before)[0], strict=True):
        assert less < more < 3.0 * less
