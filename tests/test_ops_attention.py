"""Rotary embedding, block attention, losses and ridge against their plain definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyflash.ops.attention import block_attention, context_mask
from hyflash.ops.losses import Addition, chunk_loss, decay_weights, dpace_weights, head_losses, leading_run
from hyflash.ops.ridge import NormalEquations
from hyflash.ops.rope import rope_tables, rotate


def test_rope_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 8)
    scores = []
    for shift in (0, 3, 100_000):
        turned = [rotate(x, *rope_tables(torch.tensor([p + shift]), dim=8, theta=1e4)) for x, p in ((q, 9), (k, 4))]
        scores.append((turned[0] * turned[1]).sum())
    torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores[2], scores[0], atol=1e-5, rtol=0)


def test_rope_is_rotate_half() -> None:
    cos, sin = rope_tables(torch.tensor([2]), dim=4, theta=100.0)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    c, s = torch.cos(torch.tensor([2.0, 0.2])), torch.sin(torch.tensor([2.0, 0.2]))
    want = torch.stack([x[0, 0, 0] * c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], 3 * c[0] + 1 * s[0], 4 * c[1] + 2 * s[1]])
    torch.testing.assert_close(rotate(x, cos, sin)[0, 0], want)


def naive_attention(
    q: torch.Tensor,
    ck: torch.Tensor,
    cv: torch.Tensor,
    bk: torch.Tensor,
    bv: torch.Tensor,
    mask: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    rows, anchors, queries, heads, dim = q.shape
    slots, reps = bk.shape[2], heads // bk.shape[3]
    out = torch.zeros(rows, anchors, queries, heads, dim)
    for b in range(rows):
        for a in range(anchors):
            for s in range(queries):
                visible = mask[b, a, min(s, mask.shape[2] - 1)]
                own = [j for j in range(slots) if not causal or j <= s + slots - queries]
                for h in range(heads):
                    g = h // reps
                    keys = torch.cat((ck[b, visible, g], bk[b, a, own, g]))
                    values = torch.cat((cv[b, visible, g], bv[b, a, own, g]))
                    out[b, a, s, h] = (q[b, a, s, h] @ keys.T / dim**0.5).softmax(-1) @ values
    return out.flatten(3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_keys", "queries", "per_slot"), [(0, 3, False), (1, 3, True), (7, 2, True), (7, 3, False)]
)
def test_block_attention_is_softmax_over_visible_context_and_block(
    causal: bool, num_keys: int, queries: int, per_slot: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, 6, 8)
    ck, cv = torch.randn(2, 2, num_keys, 3, 8)
    bk, bv = torch.randn(2, 2, 4, 3, 3, 8)
    mask = torch.rand(2, 4, queries if per_slot else 1, num_keys) < 0.5
    got = block_attention(q, ck, cv, bk, bv, mask, causal=causal)
    torch.testing.assert_close(got, naive_attention(q, ck, cv, bk, bv, mask, causal), atol=1e-5, rtol=1e-5)


def test_window_is_the_same_for_every_slot_unless_it_counts_slots() -> None:
    positions, anchors, window = torch.arange(10)[None], torch.tensor([[6, 0]]), torch.tensor([3])
    same = context_mask(positions, anchors, window=window, num_slots=3, counts_slots=False)
    assert same.shape == (1, 2, 1, 10)
    assert same[0, 0, 0].nonzero()[:, 0].tolist() == [3, 4, 5]
    assert not same[0, 1].any()
    moving = context_mask(positions, anchors, window=window, num_slots=3, counts_slots=True)
    assert [row.nonzero()[:, 0].tolist() for row in moving[0, 0]] == [[4, 5], [5], []]
    full = context_mask(positions, anchors, window=None, num_slots=3, counts_slots=True)
    assert full[0, 0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["ce", "ce_tv", "kl"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_chunked_losses_equal_the_whole_head_at_once(kind: str, rows: int) -> None:
    torch.manual_seed(1)
    weight, labels = torch.randn(11, 5), torch.randint(0, 11, (rows,))
    hidden = torch.randn(rows, 5, requires_grad=True)
    target = None if kind == "ce" else torch.randn(rows, 5)
    scale = torch.rand(rows)
    got = head_losses(hidden, labels, head=lambda h: h @ weight.T, kind=kind, target_hidden=target, chunk_rows=3)  # type: ignore[arg-type]
    (got.loss * scale).sum().backward()
    grad, hidden.grad = hidden.grad, None

    logits = hidden @ weight.T
    loss = F.cross_entropy(logits, labels, reduction="none")
    if target is not None:
        p, q = (target @ weight.T).softmax(-1), logits.softmax(-1)
        tv = 0.5 * (p - q).abs().sum(-1)
        loss = 0.1 * loss + 0.9 * tv if kind == "ce_tv" else (p * (p / q).log()).sum(-1)
    (loss * scale).sum().backward()
    torch.testing.assert_close(got.loss, loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad, hidden.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.prob, logits.softmax(-1).gather(1, labels[:, None])[:, 0])
    assert torch.equal(got.correct, logits.argmax(-1) == labels)
    overlap = torch.zeros(rows) if target is None else 1 - tv
    torch.testing.assert_close(got.overlap, overlap.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ce", "ce_tv", "kl"])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_low_rank_addition_is_trained_as_if_all_logits_were_there(kind: str, share: float, rows: int) -> None:
    torch.manual_seed(1)
    weight, labels, scale = torch.randn(11, 5), torch.randint(0, 11, (rows,)), torch.rand(rows)
    inputs = [torch.randn(*size, requires_grad=True) for size in ((rows, 5), (rows, 3), (11, 3))]
    hidden, latent, table = inputs
    target = None if kind == "ce" else torch.randn(rows, 5)
    got = head_losses(
        hidden, labels, head=lambda h: h @ weight.T, kind=kind, target_hidden=target, chunk_rows=3,  # type: ignore[arg-type]
        addition=Addition(latent=latent, table=table, base_share=share),
    )  # fmt: skip
    logits = hidden @ weight.T + latent @ table.T
    p = None if target is None else target @ weight.T
    loss, ce, overlap = chunk_loss(logits, labels, p, kind)  # type: ignore[arg-type]
    base = chunk_loss(hidden @ weight.T, labels, p, kind)[0]  # type: ignore[arg-type]
    want = (1 - share) * loss + share * base
    torch.testing.assert_close(got.loss, want)
    torch.testing.assert_close(got.overlap, overlap)
    torch.testing.assert_close(got.prob, (-ce).exp())
    assert torch.equal(got.correct, logits.argmax(-1) == labels)
    if rows:
        grads = torch.autograd.grad((got.loss * scale).sum(), inputs)
        for grad, right in zip(grads, torch.autograd.grad((want * scale).sum(), inputs), strict=True):
            torch.testing.assert_close(grad, right, atol=1e-5, rtol=1e-5)


def test_decay_weights_halve_as_documented() -> None:
    torch.testing.assert_close(decay_weights(3, 2.0, torch.device("cpu")), torch.exp(-torch.tensor([0.0, 0.5, 1.0])))
    assert decay_weights(3, 0.0, torch.device("cpu")).tolist() == [1, 1, 1]


def test_dpace_weights_are_tail_sums_of_survival() -> None:
    prob, mask = torch.tensor([1.0, 0.5, 0.0]), torch.tensor([True, True, True])
    survive = [1.0, 0.75, 0.375]
    want = torch.tensor([sum(survive), survive[1] + survive[2], survive[2]])
    torch.testing.assert_close(dpace_weights(prob, mask), want)
    torch.testing.assert_close(dpace_weights(prob, torch.tensor([True, False, False])), torch.tensor([1.0, 0.0, 0.0]))


def test_leading_run_stops_at_the_first_miss() -> None:
    hits = torch.tensor([[True, True, False, True], [False, True, True, True], [True, True, True, True]])
    assert leading_run(hits).tolist() == [2, 0, 4]


def test_ridge_in_pieces_is_weighted_least_squares() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(60, 4), torch.rand(60)
    true, shift = torch.randn(3, 4), torch.randn(3)
    sums = NormalEquations(4, 3)
    for part in (slice(0, 1), slice(1, 40), slice(40, 60)):
        sums.add(x[part], x[part] @ true.T + shift, weights[part])
    weight, bias = sums.solve(relative_lambda=1e-12)
    torch.testing.assert_close(weight.float(), true, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(bias.float(), shift, atol=1e-5, rtol=1e-5)
    assert sums.explained(weight, bias) == pytest.approx(1.0)


def test_reduced_rank_ridge_finds_a_low_rank_map_and_its_bias() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 6) + 1.0
    true, shift = torch.randn(5, 2) @ torch.randn(2, 6), torch.randn(5)
    sums = NormalEquations(6, 5)
    sums.add(x, x @ true.T + shift, torch.ones(200))
    up, down, bias = sums.reduce_rank(sums.solve(relative_lambda=1e-12)[0], 2)
    assert up.shape == (5, 2)
    assert down.shape == (2, 6)
    torch.testing.assert_close((up @ down).float(), true, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(bias.float(), shift, atol=1e-4, rtol=1e-4)
