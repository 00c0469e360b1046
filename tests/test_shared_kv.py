"""Drafters over the target's keys and values: what they read of it, what they keep, and their own parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafting import ask, assert_training_is_serving, commit_spans, drafts, filled, random_batch, tiny_drafter
from families import LAYERS, family_dir
from hyflash import drafters
from hyflash.core import DraftRequest, Request, SamplingParams, TrainBatch
from hyflash.drafters.base import Drafter
from hyflash.drafters.compose import Composite
from hyflash.drafters.longspark import LongSparkConfig
from hyflash.drafters.mamba import MambaMixer
from hyflash.drafters.shared_kv import SharedKVDrafter, upper_layers
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.errors import HyflashError, UserError
from hyflash.ops.attention import block_attention
from hyflash.ops.online_softmax import CHUNK, EMPTY, at_anchors, attend, find, look, merge, nothing
from hyflash.targets import hf

torch.set_num_threads(1)
METHODS = ("hspec", "longspark")
PARTS: dict[str, Any] = {"draft_vocab_size": 32, "correction": "gru", "start": "ridge"}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("hspec", PARTS),
    ("hspec", {"window": 0, "sample_from_anchor": True, "target_kv_layers": (2,)}),
    ("hspec", {"use_target_kv": False}),
    ("hspec", {"use_seed": False, "causal_block": False, "correction": "markov"}),
    ("hspec", {"pattern": "mlp attention|attention", "use_seed": False, "target_kv_layers": (2, 0)}),
    ("hspec", {"mamba_groups": 2, "mamba_heads": 6, "mamba_head_dim": 5, "mamba_conv": 1, "mamba_state": 3}),
    ("longspark", PARTS),
    ("longspark", {"window": 0, "sample_from_anchor": False, "causal_block": True}),
    ("longspark", {"num_global": 0, "target_kv_layers": (1, 1)}),
    ("longspark", {"use_boundary": False, "tap_norm": False}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> hf.HFTarget:
    return hf.load(str(family_dir(tmp_path_factory.mktemp("target"), "llama")))


def built(name: str, target: hf.HFTarget, **options: Any) -> SharedKVDrafter:
    drafter = tiny_drafter(name, target.hooks(), **options)
    assert isinstance(drafter, SharedKVDrafter)
    return drafter


def anchors_of(batch: TrainBatch, upto: tuple[int, ...]) -> list[int]:
    return [int(batch.tokens[b, n]) for b, n in enumerate(upto)]


# ----------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_training_is_serving_whatever_the_options(name: str, options: dict[str, Any], target: hf.HFTarget) -> None:
    assert_training_is_serving(built(name, target, **options))


@pytest.mark.parametrize("name", METHODS)
def test_a_state_holds_no_keys_and_values(name: str, target: hf.HFTarget) -> None:
    drafter = built(name, target)
    cost = drafter.cost(1000)
    assert cost.kv_bytes_per_token == 0
    assert cost.propose_flops == drafter.cost(10**6).propose_flops, "nor does time grow behind the window"
    state = drafter.new_state(2)
    assert not state.stores  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", METHODS)
def test_only_the_window_of_the_targets_cache_is_read_in_a_proposal(name: str, target: hf.HFTarget) -> None:
    drafter = built(name, target)
    batch = random_batch(drafter, (40, 23, 5))
    state, seen = filled(drafter, batch, (39, 22, 0)), []

    class Watch:
        def read(self, row: int, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
            seen.append((row, layer, first, last))
            kv = batch.target_kv[row, first:last, drafter.target_kv_layers.index(layer)]  # type: ignore[index]
            return kv[:, 0], kv[:, 1]

        def attend(self, row: int, layer: int, first: int, last: int, queries: Tensor) -> tuple[Tensor, Tensor]:
            return look(queries, *self.read(row, layer, first, last))

    request = DraftRequest(rows=(0, 1, 2), anchors=anchors_of(batch, (39, 22, 0)), num_tokens=(3, 3, 3), kv=Watch())
    drafter.propose(state, request)
    spans = {(row, first, last) for row, _, first, last in seen}
    assert spans == {(0, 31, 39), (1, 14, 22)}, "a row without tokens asks for none"
    assert {layer for _, layer, _, _ in seen} == set(drafter.target_kv_layers)


def test_attention_in_two_places_is_attention_to_both() -> None:
    torch.manual_seed(0)
    q, own = torch.randn(2, 1, 3, 4, 8), torch.randn(2, 2, 1, 3, 2, 8)
    keys, values = torch.randn(2, 2, 9, 2, 8)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    for causal in (False, True):
        whole = block_attention(q, keys, values, own[0], own[1], mask, causal=causal)
        for cut in (0, 4, 9):
            spans = [look(q[b, 0] * 8**-0.5, keys[b, cut:], values[b, cut:]) for b in range(2)]
            out, lse = (torch.stack(part)[:, None] for part in zip(*spans, strict=True))
            here = (keys[:, :cut], values[:, :cut], own[0], own[1], mask[..., :cut])
            both = block_attention(q, *here, causal=causal, elsewhere=(out, lse))
            torch.testing.assert_close(both, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_what_the_target_keeps_reaches_the_drafts(name: str, target: hf.HFTarget) -> None:
    drafter = built(name, target)
    batch = random_batch(drafter, (30,))
    batch = replace(batch, anchors=torch.tensor([[29]]))
    assert batch.target_kv is not None
    with torch.no_grad():
        want = drafter(batch).hidden
        for place in range(len(drafter.target_kv_layers)):
            for which in (0, 1):
                other = batch.target_kv.clone()
                other[:, 25, place, which] += 1.0  # one token in the window, its key or its value, at one layer
                assert not torch.allclose(drafter(replace(batch, target_kv=other)).hidden, want)
        other = batch.target_kv.clone()
        other[:, 20] += 1.0  # before the window
        same = torch.allclose(drafter(replace(batch, target_kv=other)).hidden, want)
        assert same == (name == "hspec"), "only a summary knows what is behind the window"


@pytest.mark.parametrize("name", METHODS)
def test_a_part_of_a_text_is_drafted_from_as_the_whole(name: str, target: hf.HFTarget) -> None:
    """Keys are rotated by their place in the text, so blocks must be too."""
    options = {"num_global": 0} if name == "longspark" else {}
    drafter = built(name, target, **options)
    batch = replace(random_batch(drafter, (40,)), anchors=torch.tensor([[25, 38]]), anchor_mask=torch.ones(1, 2).bool())
    batch = replace(batch, weights=torch.ones(1, 2))
    assert batch.target_kv is not None
    part = replace(
        batch,
        tokens=batch.tokens[:, 15:],
        features=batch.features[:, 15:],
        loss_mask=batch.loss_mask[:, 15:],
        target_kv=batch.target_kv[:, 15:],
        lengths=batch.lengths - 15,
        anchors=batch.anchors - 15,
        starts=torch.tensor([15]),
    )
    with torch.no_grad():
        whole = drafter(batch).hidden
        torch.testing.assert_close(drafter(part).hidden, whole, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(drafter(replace(part, starts=None)).hidden, whole, atol=1e-3)


@pytest.mark.parametrize("family", ["phi", "gemma3_text", "qwen3", "mistral"])
@pytest.mark.parametrize("name", METHODS)
def test_texts_are_the_targets_whatever_its_family(name: str, family: str, tmp_path: Path) -> None:
    """Partial rotation, two rotations, sliding layers, grouped heads."""
    target = hf.load(str(family_dir(tmp_path, family)))
    drafter = built(name, target)
    requests = [
        Request(prompt_ids=tuple(range(3, 3 + n)), params=SamplingParams(max_tokens=8, ignore_eos=True))
        for n in (1, 14)
    ]
    want = [r.token_ids for r in Engine(target).generate(requests)]
    results = Engine(target, drafter, policy=FixedLength(3)).generate(requests)
    assert [r.token_ids for r in results] == want
    assert all(r.draft_state_bytes == drafter.cost(0).state_bytes for r in results)


@pytest.mark.parametrize("name", METHODS)
def test_drafters_that_are_given_nothing_to_read_say_so(name: str, target: hf.HFTarget) -> None:
    drafter = built(name, target)
    batch = random_batch(drafter, (9,))
    state = filled(drafter, batch, (8,))
    with pytest.raises(HyflashError, match="was given none"):
        ask(drafter, state, (0,), [5])
    with pytest.raises(HyflashError, match="found none"):
        drafter(replace(batch, target_kv=None))
    assert batch.target_kv is not None
    with pytest.raises(HyflashError, match="found those of 0 layers"):
        drafter(replace(batch, target_kv=batch.target_kv[:, :, :0]))


@pytest.mark.parametrize("name", METHODS)
def test_a_part_of_a_composition_reads_its_own_layers(name: str, target: hf.HFTarget) -> None:
    drafter = built(name, target)
    other = built("hspec", target, pattern="attention", use_seed=False, target_kv_layers=(0,))
    both = Composite([("one", drafter), ("two", other), ("lookup", tiny_drafter("lookup", target.hooks()))])
    batch = random_batch(both, (23,))
    state = filled(both, batch, (22,))
    assert both.target_kv_layers == tuple(sorted({0, *drafter.target_kv_layers}))
    assert drafts(ask(both, state, (0,), [int(batch.tokens[0, 22])], batch=batch))[0]


# --------------------------------------------------------------------------------------- options


def test_layers_are_spread_over_the_upper_half() -> None:
    assert upper_layers(36, 3) == (17, 25, 34)
    assert upper_layers(30, 1) == (28,)
    assert upper_layers(30, 0) == ()
    assert upper_layers(3, 2) == (0, 1)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("hspec", {"num_kv_heads": 4}, "num_kv_heads is 4; expected 2"),
        ("hspec", {"head_dim": 16}, "head_dim is 16; expected 8"),
        ("longspark", {"rope_theta": 5.0}, "rope_theta is 5.0; expected 10000.0"),
        ("longspark", {"full_layers": (0,)}, "keys and values of their own"),
        ("longspark", {"target_kv_layers": (0,)}, "expected 2 layers from 0 to 2"),
        ("longspark", {"target_kv_layers": (0, LAYERS)}, "expected 2 layers from 0 to 2"),
        ("hspec", {"pattern": "mamba mpl"}, "expected layers of mamba, attention, mlp"),
        ("hspec", {"pattern": "mamba | "}, "expected layers of mamba, attention, mlp"),
        ("hspec", {"pattern": "mamba mlp"}, "use_target_kv needs a sublayer attention"),
        ("hspec", {"pattern": "attention mlp"}, "use_seed needs a sublayer mamba"),
        ("hspec", {"num_layers": 3}, "num_layers is 3; the pattern"),
        ("hspec", {"use_target_kv": False, "target_kv_layers": (1,)}, "use_target_kv is off"),
        ("hspec", {"mamba_groups": 3}, "divisor of the 4 heads"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    name: str, options: dict[str, Any], match: str, target: hf.HFTarget
) -> None:
    with pytest.raises(UserError, match=match):
        built(name, target, **options)


def test_switches_leave_out_what_they_switch_off(target: hf.HFTarget) -> None:
    bare = built("hspec", target, use_target_kv=False)
    assert bare.target_kv_layers == ()
    assert random_batch(bare, (9,)).target_kv is None
    unseeded = built("hspec", target, use_seed=False)
    batch = random_batch(unseeded, (20,))
    batch = replace(batch, anchors=torch.tensor([[19]]))
    with torch.no_grad():
        same = unseeded(replace(batch, features=-batch.features)).hidden
        assert torch.equal(unseeded(batch).hidden, same)
    unseeded(batch).hidden.sum().backward()
    idle = {name.split(".")[0] for name, p in unseeded.named_parameters() if p.grad is None}
    assert idle == {"fc", "hidden_norm", "tap_norm"}, "nobody reads the fused taps"


@pytest.mark.parametrize("name", METHODS)
def test_a_closed_form_start_drafts_alone_at_first(name: str, target: hf.HFTarget) -> None:
    method = drafters.load_class(name)
    config = method.Config.parse({**method.Config.tiny().model_dump(), "start": "ridge"}, where=name)
    drafter = method(config, target.hooks())
    assert isinstance(drafter, SharedKVDrafter)
    batch = random_batch(drafter, (20,), num_anchors=4)
    with torch.no_grad():
        out = drafter(batch).hidden
        assert drafter.ridge is not None
        rows = torch.zeros(1, 1, dtype=torch.int64)
        taps = batch.features[rows, (batch.anchors - 1).clamp(min=0)] * (batch.anchors > 0)[..., None, None]
        anchors = target.hooks().embed(batch.tokens.gather(1, batch.anchors))
        torch.testing.assert_close(out, drafter.ridge(taps[:, :, drafter.start_index], anchors))


# ---------------------------------------------------------------------------------- mamba mixer


@pytest.mark.parametrize(("slots", "kernel", "groups"), [(1, 4, 1), (3, 1, 2), (6, 4, 4), (9, 2, 2)])
@pytest.mark.parametrize("seeded", [False, True])
def test_the_mixer_is_the_recurrence_slot_by_slot(slots: int, kernel: int, groups: int, seeded: bool) -> None:
    torch.manual_seed(0)
    mixer = MambaMixer(10, num_heads=4, head_dim=3, state_dim=5, groups=groups, kernel=kernel, eps=1e-6).double()
    x, seed = torch.randn(2, 3, slots, 10).double(), torch.randn(2, 3, 4, 3, 5).double() if seeded else None
    z, mixed, dt = mixer.in_proj(x).split([12, 12 + 10 * groups, 4], dim=-1)
    h = torch.zeros(2, 3, 4, 3, 5).double() if seed is None else seed
    out = []
    for s in range(slots):
        taps = [mixed[:, :, s - j] * mixer.conv1d.weight[:, 0, kernel - 1 - j] for j in range(min(kernel, s + 1))]
        now = torch.nn.functional.silu(sum(taps) + mixer.conv1d.bias)
        own, write, read = now.split([12, 5 * groups, 5 * groups], dim=-1)
        own = own.view(2, 3, 4, 3)
        write, read = (v.view(2, 3, groups, 5).repeat_interleave(4 // groups, 2) for v in (write, read))
        step = torch.nn.functional.softplus(dt[:, :, s] + mixer.dt_bias)
        keep = (-mixer.A_log.exp() * step).exp()
        h = keep[..., None, None] * h + (step[..., None] * own)[..., None] * write[..., None, :]
        y = (h * read[..., None, :]).sum(-1) + mixer.D[:, None] * own
        gated = y.flatten(-2) * torch.nn.functional.silu(z[:, :, s])
        out.append(mixer.out_proj(mixer.norm(gated)))
    torch.testing.assert_close(mixer(x, seed), torch.stack(out, 2), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------- online softmax

H, M, G, K = 4, 3, 2, 8


def plain(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One softmax over all tokens: (H, M, K)."""
    k, v = (x.repeat_interleave(H // G, 1) for x in (keys, values))
    weights = (torch.einsum("hmk,thk->hmt", queries, k) * K**-0.5).softmax(-1)
    return torch.einsum("hmt,thk->hmk", weights, v)


@pytest.mark.parametrize("pieces", [[50], [1] * 50, [0, 7, 0, 43], [49, 1], [13, 20, 17]])
def test_a_summary_in_pieces_is_one_softmax_over_everything(pieces: list[int]) -> None:
    torch.manual_seed(1)
    queries, keys, values = 5 * torch.randn(H, M, K), 3 * torch.randn(50, G, K), torch.randn(50, G, K)
    span, first = nothing(torch.zeros(H, M, K)), 0
    for n in pieces:
        span = merge(span, find(queries, keys[first : first + n], values[first : first + n]))
        first += n
    torch.testing.assert_close(span[0], plain(queries, keys, values), atol=1e-5, rtol=1e-4)
    whole = find(queries, keys, values)
    torch.testing.assert_close(span[1], whole[1], atol=1e-4, rtol=1e-5)


def test_nothing_merges_with_nothing_to_nothing() -> None:
    queries = torch.randn(H, M, K)
    none = find(queries, torch.zeros(0, G, K), torch.zeros(0, G, K))
    for span in (none, merge(none, nothing(torch.zeros(H, M, K)))):
        assert not span[0].any()
        assert bool((span[1] == EMPTY).all())


def test_scores_of_any_size_do_not_overflow() -> None:
    scores = torch.tensor([[[1e4, -1e4, 3e4]], [[-1e4, -2e4, -3e4]]])
    out, lse = attend(scores, torch.tensor([[1.0], [2.0], [3.0]]), torch.ones(3, dtype=torch.bool))
    assert out.flatten().tolist() == [3.0, 1.0]
    assert lse.flatten().tolist() == [3e4, -1e4]


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 200])
def test_anchors_find_what_a_softmax_over_their_past_finds(length: int) -> None:
    torch.manual_seed(2)
    queries, keys, values = torch.randn(H, M, K), torch.randn(2, length, G, K), torch.randn(2, length, G, K)
    places = sorted({0, 1, length - 1, length, length // 2, min(CHUNK, length)})
    anchors = torch.tensor([places, places[::-1]])
    found = at_anchors(queries, keys, values, anchors)
    for b, row in enumerate(anchors.tolist()):
        for a, anchor in enumerate(row):
            want = plain(queries, keys[b, :anchor], values[b, :anchor]) if anchor else torch.zeros(H, M, K)
            torch.testing.assert_close(found[b, a], want, atol=1e-5, rtol=1e-4)


def test_gradients_of_a_summary_are_those_of_the_softmax() -> None:
    torch.manual_seed(3)
    keys, values, anchors = torch.randn(1, 150, G, K), torch.randn(1, 150, G, K), torch.tensor([[0, 70, 150]])
    queries = torch.randn(H, M, K, requires_grad=True)
    at_anchors(queries, keys, values, anchors).square().sum().backward()
    other = queries.detach().clone().requires_grad_()
    sum(plain(other, keys[0, :a], values[0, :a]).square().sum() for a in (70, 150)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(queries.grad, other.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_summary_beside_window_and_block_is_one_softmax_over_the_three(causal: bool) -> None:
    torch.manual_seed(4)
    B, A, S, T = 2, 3, 5, 7
    q, ck, cv = torch.randn(B, A, S, H, K), torch.randn(B, T, G, K), torch.randn(B, T, G, K)
    bk, bv = torch.randn(B, A, S, G, K), torch.randn(B, A, S, G, K)
    sk, sv = torch.randn(H, M, K), torch.randn(B, A, H, M, K)
    mask = torch.arange(T) < torch.tensor([[2, 7, 0], [5, 1, 6]])[..., None, None]
    got = block_attention(q, ck, cv, bk, bv, mask, causal=causal, summary=(sk, sv)).view(B, A, S, H, K)
    for b, a, s, h in ((0, 0, 0, 0), (0, 2, 4, 3), (1, 1, 2, 1), (1, 2, 3, 2)):
        g, near = h // (H // G), s + 1 if causal else S
        far = mask[b, a, 0].nonzero()[:, 0]
        keys = torch.cat((ck[b, far, g], bk[b, a, :near, g], sk[h]))
        values = torch.cat((cv[b, far, g], bv[b, a, :near, g], sv[b, a, h]))
        want = (keys @ q[b, a, s, h] * K**-0.5).softmax(0) @ values
        torch.testing.assert_close(got[b, a, s, h], want, atol=1e-5, rtol=1e-4)


def test_a_summary_remembers_the_committed_tokens_alone(target: hf.HFTarget) -> None:
    drafter = built("longspark", target)
    batch = random_batch(drafter, (40,))
    assert batch.target_kv is not None
    state = filled(drafter, batch, (30,), pieces=[1, 12, 0, 17])
    saved = state.snapshot(0)["fixed"]
    queries = drafter.queries  # type: ignore[union-attr]
    for i in range(2):
        place = drafter.target_kv_layers.index(drafter.config.kv_layers[i])
        kv = batch.target_kv[0, :30, place]
        out, lse = find(queries[i].detach(), kv[:, 0], kv[:, 1])  # type: ignore[index]
        torch.testing.assert_close(saved[f"found.{i}"], out, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(saved[f"lse.{i}"], lse, atol=1e-4, rtol=1e-4)
    commit_spans(drafter, state, batch, {0: (30, 31)}, {0: 0})
    assert not torch.equal(state.snapshot(0)["fixed"]["lse.0"], saved["lse.0"])


def test_a_target_with_fewer_layers_than_attentions_has_one_read_twice(target: hf.HFTarget) -> None:
    hooks = replace(target.hooks(), info=replace(target.info, num_layers=1))
    assert LongSparkConfig.tiny().resolved(hooks).kv_layers == (0, 0)
    with pytest.raises(UserError, match="expected 2 layers from 0 to 0"):
        LongSparkConfig.tiny().model_copy(update={"target_kv_layers": (0, 1)}).resolved(hooks)


def test_the_methods_are_found() -> None:
    assert set(METHODS) <= set(drafters.names())
    assert not {"mamba", "shared_kv"} & set(drafters.names())
    assert all(issubclass(drafters.load_class(name), Drafter) for name in METHODS)
