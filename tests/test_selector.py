"""The candidate selector: a greedy path over scored neighbours, its probabilities, losses with all their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyflash.drafters.selector import PairScorer, list_probs, selection_losses, walk
from hyflash.ops.losses import candidate_losses, head_losses


class TableScorer(PairScorer):
    """Scores of pairs of tokens from a table (V, V), and nothing else."""

    def __init__(self, table: Tensor, *, rates_list: bool = False) -> None:
        super().__init__()
        self.table, self.calls = table, []  # type: ignore[var-annotated]
        self.rates_list = rates_list  # type: ignore[misc]

    def contexts(self, hidden: Tensor) -> Tensor:
        return hidden[..., :1] * 0

    def predecessors(self, ids: Tensor) -> Tensor:
        return ids[..., None]

    def successors(self, ids: Tensor) -> Tensor:
        return ids[..., None]

    def score(self, context: Tensor, before: Tensor, after: Tensor) -> Tensor:
        out = self.table[before, after[..., 0].unsqueeze(-2)]
        self.calls.append(out.numel())
        return out

    def flops(self, num_slots: int, num_candidates: int) -> int:
        return 0


def case(rows: int, slots: int, count: int, vocab: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, anchors, candidate log-probabilities and ids; each slot's ids are distinct, best first."""
    random = torch.Generator().manual_seed(rows * 100 + slots * 10 + count)
    logits = torch.randn(rows, slots, vocab, generator=random)
    values, ids = logits.log_softmax(-1).topk(count, dim=-1)
    return torch.randn(rows, slots, 4, generator=random), torch.arange(rows) + 1, values, ids


@pytest.mark.parametrize(("rows", "slots", "count"), [(1, 1, 1), (1, 1, 4), (2, 5, 1), (3, 4, 5), (1, 15, 11)])
def test_the_walk_takes_the_best_continuation_of_what_it_took_before(rows: int, slots: int, count: int) -> None:
    hidden, anchors, logprobs, ids = case(rows, slots, count)
    table = 3.0 * torch.randn(11, 11, generator=torch.Generator().manual_seed(5))
    path = walk(TableScorer(table), hidden, anchors, logprobs, ids)
    for b in range(rows):
        before = int(anchors[b])
        for t in range(slots):
            scores = [float(logprobs[b, t, k] + table[before, ids[b, t, k]]) for k in range(count)]
            place = max(range(count), key=scores.__getitem__)
            assert path.places[b, t] == place
            share = math.exp(scores[place]) / sum(map(math.exp, scores)) * float(logprobs[b, t].exp().sum())
            assert path.probs[b, t] == pytest.approx(share, rel=1e-4)
            before = int(ids[b, t, place])
    assert path.finite.all()


def test_the_walk_is_prefix_first_and_not_the_best_whole_path() -> None:
    table = torch.zeros(4, 4)
    table[1, 3] = 5.0  # a great second token, but only after the worse first one
    ids = torch.tensor([[[0, 1], [2, 3]]])
    logprobs = torch.tensor([[[0.6, 0.4], [0.5, 0.5]]]).log()
    path = walk(TableScorer(table), torch.zeros(1, 2, 4), torch.tensor([2]), logprobs, ids)
    assert path.places.tolist() == [[0, 0]]


@pytest.mark.parametrize("rates_list", [False, True])
def test_scores_of_zero_leave_tokens_and_probabilities_as_they_were(rates_list: bool) -> None:
    hidden, anchors, logprobs, ids = case(2, 5, 4)
    path = walk(TableScorer(torch.zeros(11, 11), rates_list=rates_list), hidden, anchors, logprobs, ids)
    assert not path.places.any()
    torch.testing.assert_close(path.probs, logprobs[..., 0].exp())


@pytest.mark.parametrize(("slots", "count"), [(1, 16), (2, 3), (5, 16), (15, 4)])
def test_all_neighbours_are_scored_in_one_pass(slots: int, count: int) -> None:
    hidden, anchors, logprobs, ids = case(1, slots, count, vocab=20)
    scorer = TableScorer(torch.zeros(20, 20))
    walk(scorer, hidden, anchors, logprobs, ids)
    assert scorer.calls == [count, (slots - 1) * count**2]


def test_only_slots_before_a_broken_one_are_finite_along_the_path() -> None:
    hidden, anchors, logprobs, ids = case(2, 4, 3)
    logprobs[0, 2, 1] = torch.nan
    table = torch.zeros(11, 11)
    table[:, int(ids[1, 1, 2])] = torch.nan
    path = walk(TableScorer(table), hidden, anchors, logprobs, ids)
    assert path.finite.long().cumprod(1).sum(1)[0] <= 2
    assert path.finite.long().cumprod(1).sum(1)[1] <= 1
    assert ((path.places >= 0) & (path.places < 3)).all()


def test_probabilities_with_a_rated_list_are_those_of_all_tokens_with_candidates_rescored() -> None:
    logits = torch.randn(3, 9)
    logprobs = logits.log_softmax(-1)
    best, columns = logprobs.topk(4, dim=-1)
    scores = best + torch.randn(3, 4)
    want = logprobs.scatter(-1, columns, scores).softmax(-1).gather(-1, columns)
    torch.testing.assert_close(list_probs(TableScorer(torch.zeros(1, 1), rates_list=True), scores, best), want)


def test_a_label_outside_the_list_counts_only_where_the_list_is_rated() -> None:
    logprobs = torch.tensor([[0.5, 0.2], [0.6, 0.3], [0.4, 0.4]]).log()
    scores = logprobs + torch.tensor([[0.0, 2.0], [0.0, 0.0], [1.0, 0.0]])
    found = torch.tensor([[False, True], [False, False], [False, True]])
    loss, counted, correct = selection_losses(TableScorer(torch.zeros(1, 1)), scores, logprobs, found)
    assert counted.tolist() == [True, False, True]
    assert correct.tolist() == [True, False, False]
    odds = math.exp(2.0) * 0.2
    assert loss.tolist() == pytest.approx([math.log((0.5 + odds) / odds), 0.0, math.log((math.e * 0.4 + 0.4) / 0.4)])
    rated = TableScorer(torch.zeros(1, 1), rates_list=True)
    loss, counted, correct = selection_losses(rated, scores, logprobs, found)
    assert counted.all()
    assert correct.tolist() == [True, False, False]
    assert loss[1] == pytest.approx(-math.log(0.1), rel=1e-4)
    assert loss[0] == pytest.approx(math.log((0.5 + odds + 0.3) / odds), rel=1e-4)


@pytest.mark.parametrize("kind", ["ce", "ce_tv", "kl"])
@pytest.mark.parametrize(("num_rows", "chunk_rows"), [(0, 4), (1, 4), (7, 3), (8, 8)])
def test_candidates_and_row_losses_have_the_gradients_of_whole_logits(
    kind: Any, num_rows: int, chunk_rows: int
) -> None:
    random = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(13, 6, generator=random)
    hidden = torch.randn(num_rows, 6, generator=random, requires_grad=True)
    labels = torch.randint(0, 13, (num_rows,), generator=random)
    target = None if kind == "ce" else torch.randn(num_rows, 6, generator=random)

    def head(rows: Tensor) -> Tensor:
        return 3.0 * torch.tanh(rows @ weight.T)  # not linear, as with a soft-cap

    options: dict[str, Any] = {"head": head, "kind": kind, "target_hidden": target, "chunk_rows": chunk_rows}
    rows, best = candidate_losses(hidden, labels, num_candidates=4, **options)
    plain = head_losses(hidden, labels, **options)
    torch.testing.assert_close(rows.loss, plain.loss)
    torch.testing.assert_close(rows.prob, plain.prob)
    assert torch.equal(rows.correct, plain.correct)
    assert not rows.prob.requires_grad
    values, columns = head(hidden).log_softmax(-1).topk(4, dim=-1)
    assert torch.equal(best.columns, columns)
    torch.testing.assert_close(best.logprobs, values)
    share = torch.randn(num_rows, 4, generator=random)
    got = torch.autograd.grad(rows.loss.sum() + (best.logprobs * share).sum(), hidden)[0]
    want = torch.autograd.grad(plain.loss.sum() + (values * share).sum(), hidden)[0]
    torch.testing.assert_close(got, want)


def test_candidates_of_a_frozen_backbone_build_no_graph() -> None:
    weight = torch.randn(9, 4)
    rows, best = candidate_losses(
        torch.randn(5, 4), torch.zeros(5).long(), head=lambda x: F.linear(x, weight), num_candidates=2
    )
    assert not rows.loss.requires_grad
    assert not best.logprobs.requires_grad
