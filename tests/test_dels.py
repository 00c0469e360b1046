"""DeLS: what the fused logits are, that a new head changes nothing, that it alone may learn, and from text alone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from block_fakes import DIM, VOCAB, ask, commit_prefix, fake_batch, fake_hooks
from drafting import assert_training_is_serving, drafts, stated
from fake_training import FakeTarget, make_answers
from hyflash import checkpoint, drafters
from hyflash.core import Proposal, TargetHooks, TrainBatch
from hyflash.data.capture import LiveSource
from hyflash.data.shards import ShardReader, write_shards
from hyflash.drafters import hyflash
from hyflash.drafters.base import Drafter
from hyflash.drafters.dels import DeLSConfig, DrafterImpl
from hyflash.drafters.hyflash import HyFlashConfig
from hyflash.drafters.local_expert import LocalExpert, fold, folds
from hyflash.errors import UserError
from hyflash.layers import GRUCorrection
from hyflash.ops.losses import decay_weights
from hyflash.train import trainer
from hyflash.train.optim import freeze
from hyflash.train.recipe import Recipe, parse_recipe

SMALL: dict[str, Any] = {"num_layers": 1, "num_draft_tokens": 4, "num_taps": 2}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "reduced": ("dflash", {"draft_vocab_size": 20}),
    "gru": ("dflash", {"draft_vocab_size": 20, "correction": "gru"}),
    "markov": ("hyflash", {"window": 6, "correction": "markov"}),
    "ridge": ("hyflash", {"window": 6, "draft_vocab_size": 20, "start": "ridge"}),
    "from-anchor": ("dflash", {"sample_from_anchor": True}),
}
EXPERTS: dict[str, dict[str, Any]] = {
    "gru": {"expert_width": 6},
    "markov": {"expert": "markov"},
    "gru-vocab": {"expert_width": 6, "expert_head": "vocab", "expert_activation": "silu"},
    "markov-vocab": {"expert": "markov", "expert_head": "vocab"},
    "schedule": {"expert_width": 6, "alpha": (0.5, 0.2, 0.0, 0.7), "beta": (0.1, 0.3, 0.4, 0.0)},
}


def shaken(drafter: Drafter, scale: float = 0.3) -> Drafter:
    """Random everywhere, so that nothing agrees because it is zero or one."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return drafter.eval()


def save_base(path: Path, kind: str, hooks: TargetHooks | None = None) -> Drafter:
    name, options = BASES[kind]
    torch.manual_seed(3)
    cls = drafters.load_class(name)
    base = shaken(cls(cls.Config.parse({**SMALL, **options}, where="test"), hooks or fake_hooks()))
    checkpoint.save(base, path, dtype="fp32")
    return base


def build(base: str = "dflash", **options: Any) -> DrafterImpl:
    """Random weights, and labels that were counted."""
    torch.manual_seed(0)
    values = {**SMALL, "memory_core": "delta" if BASES[base][0] == "hyflash" else "none", **BASES[base][1]}
    drafter = DrafterImpl(DeLSConfig(**values, expert_rank=5, **options), fake_hooks())
    shaken(drafter)
    drafter.set_label_counts(torch.arange(VOCAB) ** 2)
    return drafter


def backbone(drafter: DrafterImpl) -> hyflash.DrafterImpl:
    """The same drafter without the short expert."""
    names = HyFlashConfig.model_fields.keys()
    plain = hyflash.DrafterImpl(HyFlashConfig(**drafter.config.model_dump(include=set(names))), fake_hooks())
    plain.load_state_dict({k: v for k, v in drafter.state_dict().items() if k in plain.state_dict()})
    return plain.eval()


def proposal(drafter: Drafter, batch: TrainBatch) -> Proposal:
    """After all but the last token of each sequence, with those as anchors."""
    state, upto = drafter.new_state(len(batch.tokens)), [int(n) - 1 for n in batch.lengths]
    commit_prefix(drafter, state, batch, upto)
    return drafter.propose(state, ask(batch.tokens[torch.arange(len(upto)), upto]))


def text_of(batch: TrainBatch) -> TrainBatch:
    return replace(batch, features=batch.features[:, :, :0])


# ------------------------------------------------------------------------------------------- fusion


def short_logprobs(drafter: DrafterImpl, before: Tensor) -> Tensor:
    """log p_short (N, L, V) after token ids (N, L), written as the paper has it."""
    expert, x = drafter.expert, drafter.hooks.embed(before)
    x = x / (x.square().mean(-1, keepdim=True) + drafter.config.rms_norm_eps).sqrt()
    if expert.gru is not None:
        x = expert.gru(x)[0]
    low = x @ expert.down.weight.T
    low = F.silu(low) if drafter.config.expert_activation == "silu" else low
    rows = expert.up if drafter.config.expert_head == "vocab" else drafter.hooks.head_rows(torch.arange(VOCAB))
    rows = rows if rows is expert.up else rows @ expert.up
    return (low @ rows.T + drafter.log_prior).log_softmax(-1)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("expert", EXPERTS)
@torch.no_grad()
def test_logits_are_the_weighted_sum_of_log_probabilities(base: str, expert: str) -> None:
    drafter = build(base, **EXPERTS[expert])
    batch = fake_batch(drafter, lengths=(23, 11))
    out, plain = drafter(batch), backbone(drafter)
    long = plain.logits(plain(batch)).log_softmax(-1)
    anchors = batch.tokens.gather(1, batch.anchors)
    before = torch.cat((anchors[..., None], out.labels[..., :-1]), dim=-1)
    short = short_logprobs(drafter, before.flatten(0, 1)).view_as(long)
    want = long + drafter.alpha[:, None] * short - drafter.beta[:, None] * drafter.log_prior
    torch.testing.assert_close(drafter.logits(out).log_softmax(-1), want.log_softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("expert", EXPERTS)
def test_training_is_serving(base: str, expert: str) -> None:
    assert_training_is_serving(build(base, **EXPERTS[expert]))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("options", [{}, {"expert_head": "vocab"}, {"expert": "markov"}, {"alpha": 0.0, "beta": 0.0}])
def test_a_new_head_drafts_what_its_base_drafts(base: str, options: dict[str, Any], tmp_path: Path) -> None:
    plain = save_base(tmp_path, base)
    drafter = checkpoint.load(f"dels:{tmp_path}", fake_hooks(), options=options)
    drafter.set_label_counts(torch.arange(VOCAB))
    batch = fake_batch(drafter, lengths=(9, 1, 14))
    got, want = proposal(drafter, batch), proposal(plain, batch)
    assert drafts(got) == drafts(want)
    torch.testing.assert_close(torch.tensor(stated(got)), torch.tensor(stated(want)))


def test_a_dflash_in_the_published_format_is_a_base(tmp_path: Path) -> None:
    hooks = fake_hooks(num_layers=8)
    plain = {"num_layers": 2, "num_draft_tokens": 3, "num_taps": 2, "tap_norm": False, "head_dim": 8}
    cls = drafters.load_class("dflash")
    base = shaken(cls(cls.Config.parse(plain, where="test"), hooks))
    checkpoint.save(base, tmp_path, dtype="fp32")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["hyflash"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = checkpoint.load(f"dels:{tmp_path}", hooks)
    batch = fake_batch(drafter, lengths=(9, 14))
    assert drafts(proposal(drafter, batch)) == drafts(proposal(base, batch))


def test_the_short_expert_sees_the_drafts_before() -> None:
    """An expert of weight 1000 decides alone, so the second draft follows from the anchor and the first."""
    drafter = build(expert_width=6, alpha=1000.0, beta=1000.0)
    batch = fake_batch(drafter, lengths=(9, 4, 14, 6))
    tokens = torch.tensor(drafts(proposal(drafter, batch)))
    anchors = batch.tokens[torch.arange(4), batch.lengths - 1]
    with torch.no_grad():
        alone = short_logprobs(drafter, torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)) - drafter.log_prior
    assert torch.equal(tokens, alone.argmax(-1))
    assert tokens.tolist() != drafts(proposal(backbone(drafter), batch))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("activation", ["none", "silu"])
@torch.no_grad()
def test_a_folded_correction_adds_what_both_add(own: bool, activation: Any) -> None:
    torch.manual_seed(0)
    expert = LocalExpert(DIM, kind="gru", width=6, rank=5, activation=activation, eps=1e-6)
    correction = GRUCorrection(DIM, width=7, rank=3, eps=1e-6) if own else None
    for part in (expert, correction):
        for parameter in () if part is None else part.parameters():
            parameter.normal_()
    hidden, before = torch.randn(2, 4, DIM), torch.randn(2, 4, DIM)
    both = fold(expert, 0.4, correction)
    got, state = both(hidden, before, torch.zeros(2, both.state_width))
    want = hidden if correction is None else correction(hidden, before, torch.zeros(2, 7))[0]
    short, last = expert(before, torch.zeros(2, 6))
    torch.testing.assert_close(got, want + 0.4 * short @ expert.up.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state[:, -6:], last)


@pytest.mark.parametrize(("expert", "fits"), [("gru", True), ("markov", False), ("gru-vocab", False)])
def test_a_bigram_and_a_table_of_their_own_do_not_fold(expert: str, fits: bool) -> None:
    assert folds(build("gru", **EXPERTS[expert]).expert) is fits


@pytest.mark.parametrize("counts", [torch.zeros(VOCAB), torch.arange(VOCAB) % 3])
def test_the_unigram_is_counted_with_one_added(counts: Tensor) -> None:
    drafter = build()
    drafter.set_label_counts(counts.long())
    torch.testing.assert_close(drafter.log_prior.exp(), ((counts + 1) / (counts.sum() + VOCAB)).float())
    assert drafter.counts_labels is not bool(counts.any())


# ----------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("expert", EXPERTS)
def test_over_a_frozen_base_only_the_head_learns(expert: str) -> None:
    drafter = build("ridge", **EXPERTS[expert])
    freeze(drafter, ["expert.*"])
    assert drafter.trains_on_text
    assert not drafter.train().training, "no dropout of the base"
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    optimiser = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=0.1)
    batch = fake_batch(drafter)
    proposal(drafter, batch)
    drafter.loss(drafter(text_of(batch)), batch).numerator.backward()
    optimiser.step()
    changed = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.startswith("expert.")}
    fresh = build("ridge", **EXPERTS[expert])
    fresh.load_state_dict(drafter.state_dict())
    assert proposal(drafter, batch) == proposal(fresh, batch), "nothing kept from before the step"


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("expert", ["gru", "markov-vocab"])
def test_text_alone_gives_the_loss_and_gradients_of_text_with_features(base: str, expert: str) -> None:
    drafter = build(base, **EXPERTS[expert])
    freeze(drafter, ["expert.*"])
    batch = fake_batch(drafter, lengths=(23, 11))
    found = []
    for given in (batch, text_of(batch)):
        drafter.zero_grad()
        terms = drafter.loss(drafter(given), given)
        terms.numerator.backward()
        found.append((terms.numerator, terms.denominator, [p.grad for p in drafter.expert.parameters()]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("base", ["dflash", "reduced"])
def test_the_loss_is_the_cross_entropy_of_the_short_expert_and_the_metrics_are_of_both(base: str) -> None:
    drafter = build(base, **EXPERTS["schedule"])
    freeze(drafter, ["expert.*"])
    batch = fake_batch(drafter)
    out = drafter(batch)
    labels, anchors = out.labels[out.mask], batch.tokens.gather(1, batch.anchors)
    before = torch.cat((anchors[..., None], out.labels[..., :-1]), dim=-1)
    ids = torch.unique(torch.cat((torch.arange(20), labels))) if base == "reduced" else torch.arange(VOCAB)
    with torch.no_grad():
        short = short_logprobs(drafter, before.flatten(0, 1)).view(*out.mask.shape, VOCAB)[out.mask]
        fused = drafter.logits(out)[out.mask][:, ids].argmax(-1)
    wrong = F.cross_entropy(short[:, ids], torch.searchsorted(ids, labels), reduction="none")
    weights = decay_weights(4, 4.0, wrong.device).expand(out.mask.shape)[out.mask]
    terms = drafter.loss(out, batch)
    torch.testing.assert_close(terms.numerator, (wrong * weights).sum())
    torch.testing.assert_close(terms.denominator, weights.sum())
    hits = sum(count for name, (count, _) in terms.metrics.items() if name.startswith("acc@"))
    assert hits == int((ids[fused] == labels).sum())


def test_a_base_that_learns_as_well_adds_its_own_loss() -> None:
    drafter = build("gru", **EXPERTS["gru"])
    assert not drafter.trains_on_text
    batch, plain = fake_batch(drafter), backbone(drafter)
    both, base = drafter.loss(drafter(batch), batch), plain.loss(plain(batch), batch)
    freeze(drafter, ["expert.*"])
    alone = drafter.loss(drafter(batch), batch)
    torch.testing.assert_close(both.numerator, base.numerator + alone.numerator)
    torch.testing.assert_close(both.denominator, base.denominator)
    assert both.metrics["base_tau"] == base.metrics["tau"]
    assert both.metrics["tau"] == alone.metrics["tau"]


def test_a_batch_without_labels_or_weight_has_no_loss() -> None:
    drafter = build(**EXPERTS["gru"])
    freeze(drafter, ["expert.*"])
    batch = text_of(fake_batch(drafter))
    none = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    for given in (replace(batch, weights=batch.weights * 0), none):
        terms = drafter.loss(drafter(given), given)
        assert (terms.numerator.item(), terms.denominator.item()) == (0.0, 0.0)


# ------------------------------------------------------------------------------- options, on disk


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": (0.3, 0.3)}, "alpha has 2 values; expected one number, or one for each of the 4 draft tokens"),
        ({"beta": ()}, "beta has 0 values"),
        ({"expert": "markov", "expert_width": 8}, "expert_width is of the gru expert"),
        ({"alpha": "high"}, "alpha"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DrafterImpl(DeLSConfig.parse({**SMALL, **options}, where="dels"), fake_hooks())


def test_a_saved_dels_holds_its_base_and_is_none(tmp_path: Path) -> None:
    save_base(tmp_path / "base", "gru")
    options = {"expert_width": 6, "alpha": [0.5, 0.2, 0.0, 0.7]}
    drafter = checkpoint.load(f"dels:{tmp_path / 'base'}", fake_hooks(), options=options)
    shaken(drafter)
    drafter.set_label_counts(torch.arange(VOCAB))
    checkpoint.save(drafter, tmp_path / "dels", dtype="fp32")
    loaded = checkpoint.load(str(tmp_path / "dels"), fake_hooks())
    assert isinstance(loaded, DrafterImpl)
    assert loaded.config == drafter.config
    assert loaded.config.alpha == (0.5, 0.2, 0.0, 0.7)
    assert not loaded.counts_labels
    batch = fake_batch(drafter, lengths=(9, 14))
    assert proposal(loaded, batch) == proposal(drafter, batch)
    with pytest.raises(UserError, match="unknown option"):
        checkpoint.load(f"dflash:{tmp_path / 'dels'}", fake_hooks())


# ------------------------------------------------------------------------------------ in the trainer


def recipe(drafter: dict[str, Any], **data: Any) -> Recipe:
    train = {"steps": 4, "precision": "float32", "lr": 1e-2, "warmup_steps": 0, "only": ["expert.*"]}
    drafter = {"name": "dels", **drafter}
    tables = {"target": {"name": "fake"}, "drafter": drafter, "data": {"held_out": 0, **data}, "train": train}
    return parse_recipe(tables, where="test")


def test_training_needs_text_alone_and_runs_no_target(tmp_path: Path) -> None:
    target = FakeTarget()
    base = save_base(tmp_path / "base", "gru", target.hooks())
    rows = [json.dumps(asdict(answer)) for answer in make_answers(9)]
    (tmp_path / "answers.jsonl").write_text("\n".join(rows))
    given = recipe(
        {"init": str(tmp_path / "base"), "expert_width": 6, "expert_rank": 5}, answers=str(tmp_path / "answers.jsonl")
    )
    best = trainer.train(given, target, out_dir=tmp_path / "run", quiet=True)
    assert target.widths == []
    drafter = checkpoint.load(str(best), target.hooks())
    assert isinstance(drafter, DrafterImpl)
    assert bool(drafter.expert.up.any())
    counts = LiveSource(target, make_answers(9), taps=()).label_counts([f"a{i:03d}" for i in range(9)], 32) + 1
    torch.testing.assert_close(drafter.log_prior.exp(), counts / counts.sum())
    for name, tensor in base.state_dict().items():
        stored = tensor.half().to(tensor.dtype) if tensor.is_floating_point() and tensor.dim() > 1 else tensor
        assert torch.equal(drafter.state_dict()[name], stored)


def test_a_frozen_base_must_come_from_a_checkpoint() -> None:
    with pytest.raises(UserError, match="dels would learn over random weights; expected init"):
        trainer.make_drafter(recipe({}, answers="answers.jsonl"), FakeTarget().hooks())


def test_training_that_goes_on_keeps_the_unigram(tmp_path: Path) -> None:
    hooks = FakeTarget().hooks()
    save_base(tmp_path / "base", "gru", hooks)
    drafter = checkpoint.load(f"dels:{tmp_path / 'base'}", hooks, options={"expert_width": 6})
    drafter.set_label_counts(torch.arange(32))
    checkpoint.save(drafter, tmp_path / "dels")
    write_shards(FakeTarget(), make_answers(9), tmp_path / "shards", taps=(3,))
    given = recipe({"init": str(tmp_path / "dels")}, shards=str(tmp_path / "shards"))
    best = trainer.train(given, FakeTarget(), out_dir=tmp_path / "run", quiet=True)
    assert torch.equal(checkpoint.load(str(best), hooks).state_dict()["log_prior"], drafter.state_dict()["log_prior"])


@pytest.mark.parametrize(("held_out", "taps"), [(0, (3,)), (2, (0, 1, 2, 3, 4))])
def test_captured_shards_serve_as_text_and_their_features_to_evaluate(
    held_out: int, taps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base", "reduced", FakeTarget().hooks())
    write_shards(FakeTarget(), make_answers(9), tmp_path / "shards", taps=taps)
    seen: list[tuple[bool, int]] = []
    real = DrafterImpl.forward

    def forward(self: DrafterImpl, batch: TrainBatch) -> Any:
        seen.append((torch.is_grad_enabled(), batch.features.shape[2]))
        return real(self, batch)

    monkeypatch.setattr(DrafterImpl, "forward", forward)
    options = {"init": str(tmp_path / "base"), "expert": "markov", "expert_rank": 5}
    best = trainer.train(
        recipe(options, shards=str(tmp_path / "shards"), held_out=held_out),
        FakeTarget(),
        out_dir=tmp_path / "run",
        quiet=True,
    )
    assert {count for learns, count in seen if learns} == {0}
    assert {count for learns, count in seen if not learns} == ({len(base.target_layer_ids)} if held_out else set())
    assert checkpoint.read_card(best)["init"] == str(tmp_path / "base")


def test_examples_without_features_are_the_same_texts(tmp_path: Path) -> None:
    target = FakeTarget()
    write_shards(target, make_answers(5), tmp_path, taps=(1, 3))
    live, reader = LiveSource(target, make_answers(5), taps=(1, 3)), ShardReader(tmp_path)
    whole = reader.fetch(reader.ids)
    target.widths.clear()
    for source in (live, reader):
        for text, example in zip(source.fetch(source.ids, features=False), whole, strict=True):
            assert text.features.shape == (len(example.tokens), 0, example.features.shape[2])
            assert torch.equal(text.tokens, example.tokens)
            assert torch.equal(text.loss_mask, example.loss_mask)
            assert torch.equal(text.loop_mask, example.loop_mask)
    assert target.widths == []
