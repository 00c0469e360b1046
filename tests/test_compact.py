"""A small language model with a compact memory as drafter: what it sees, what it keeps, what it reads from disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Core
from tokenizers import models

from drafting import (
    ask,
    assert_same_snapshot,
    assert_training_is_serving,
    commit_spans,
    drafts,
    filled,
    random_batch,
    stated,
    tiny_drafter,
)
from families import VOCAB, family_dir, text
from hyflash import api, checkpoint
from hyflash.core import Commit, DraftRequest, Draw, SamplingParams, TargetHooks
from hyflash.drafters.compact import CompactConfig, DrafterImpl
from hyflash.drafters.compaction import NOWHERE, Compaction, CompactState, Entries
from hyflash.drafters.small_lm import PADDING
from hyflash.errors import HyflashError, UserError
from hyflash.targets import hf
from hyflash.train.optim import freeze

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compact")


@pytest.fixture(scope="module")
def hooks(home: Path) -> TargetHooks:
    return hf.load(str(family_dir(home, "llama", name="target"))).hooks()


def compact(directory: Path, hooks: TargetHooks, **options: Any) -> DrafterImpl:
    drafter = checkpoint.load(f"compact:{directory}", hooks, options=options)
    assert isinstance(drafter, DrafterImpl)
    return drafter


def entries(positions: list[int], is_slot: list[bool]) -> Entries:
    return Entries(positions=torch.tensor([positions]), is_slot=torch.tensor(is_slot))


# ------------------------------------------------------------------------------------------- the rule

RULES = [
    Compaction(sink=sink, window=window, ratio=ratio)
    for sink, window, ratio in [(2, 5, 4), (0, 3, 2), (3, 7, 1), (4, 4, 3), (0, 9, 5), (1, 6, 4)]
]


def covered(rule: Compaction, entry: tuple[int, bool]) -> list[int]:
    """Tokens that an entry stands for."""
    position, is_slot = entry
    return list(range(position - rule.ratio + 1, position + 1)) if is_slot else [position]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_earlier_token_is_seen_exactly_once_itself_or_in_its_slot(rule: Compaction) -> None:
    length = 40
    keys = [(p, False) for p in range(length)] + [(p, True) for p in rule.slot_positions(0, rule.num_slots(length))]
    known = entries([p for p, _ in keys], [s for _, s in keys])
    mask = rule.visible(known, known)[0]
    for (position, is_slot), row in zip(keys, mask.tolist(), strict=True):
        own = (position, is_slot)
        seen = sorted(t for key, yes in zip(keys, row, strict=True) if yes and key != own for t in covered(rule, key))
        assert seen == list(range(position))
        assert row[keys.index(own)], "everybody sees itself"


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_window_holds_what_it_says_and_less_than_a_slot_more(rule: Compaction) -> None:
    positions = torch.arange(60)
    starts = rule.window_starts(positions)
    held = positions - starts + 1
    late = starts > rule.sink
    assert late.any()
    assert held[late].min() == rule.window
    assert held[late].max() == rule.window + rule.ratio - 1
    assert (held[~late] <= rule.window + rule.ratio - 1).all()
    assert int((positions - starts).max()) <= rule.ring


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_longest_draft_sees_no_slot_that_is_not_committed(rule: Compaction) -> None:
    for length in range(40):
        last = int(rule.window_starts(torch.tensor(length + rule.window - 1)))
        committed = rule.slot_positions(0, rule.num_slots(length))
        assert [p for p in rule.slot_positions(0, 60) if p < last] == [p for p in committed if p < last]


def test_empty_places_are_seen_by_nobody() -> None:
    rule = Compaction(sink=2, window=5, ratio=4)
    queries = entries([0, 30, 14], [False, False, True])
    assert not rule.visible(queries, entries([NOWHERE, NOWHERE], [False, True])).any()


def test_without_slots_what_leaves_the_window_is_gone() -> None:
    rule = Compaction(sink=2, window=3, ratio=0)
    assert rule.num_slots(100) == 0
    known = entries(list(range(9)), [False] * 9)
    seen = rule.visible(entries([8], [False]), known)[0, 0]
    assert seen.nonzero().flatten().tolist() == [0, 1, 6, 7, 8]
    assert Compaction(sink=0, window=1, ratio=0).visible(known, known)[0].equal(torch.eye(9, dtype=torch.bool))


# ---------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("rule", [*RULES, Compaction(sink=3, window=1, ratio=0)], ids=str)
@pytest.mark.parametrize("pieces", [[1] * 30, [30], [3, 1, 9, 2, 15]], ids=str)
def test_a_state_holds_the_entries_that_a_next_query_sees_at_their_positions(
    rule: Compaction, pieces: list[int]
) -> None:
    drafter = tiny_shape()
    state = CompactState(rule, drafter._shape(), num_layers=2, num_rows=3)
    done = 0
    for size in pieces:
        new = torch.arange(done, done + size).float()
        slots = rule.slot_positions(rule.num_slots(done), rule.num_slots(done + size))
        state.append(1, filled_with(new), filled_with(-torch.tensor(slots).float()))
        done += size
        held = state.held([1], spare=2)
        query = entries([done], [False])
        seen = rule.visible(query, held.entries)[0, 0]
        want = entries(
            [*range(done), *(p := rule.slot_positions(0, rule.num_slots(done)))], [False] * done + [True] * len(p)
        )
        expected = want.positions[0, rule.visible(query, want)[0, 0]].tolist()
        assert sorted(held.entries.positions[0, seen].tolist()) == sorted(expected)
        values = held.data[1, 0, : len(seen), 1, 0, 0]
        signs = torch.where(held.entries.is_slot, -1, 1)
        assert torch.equal(values[seen], (held.entries.positions[0] * signs)[seen].float())
        assert held.data.shape[2] == len(seen) + 2
    assert state.lengths == [0, 30, 0]


def tiny_shape() -> DrafterImpl:
    from toys import ToyTarget

    return DrafterImpl(CompactConfig.tiny(), ToyTarget(torch.zeros(32, 32)).hooks())


def filled_with(values: torch.Tensor) -> torch.Tensor:
    """(layers, n, 2, G, K) of one number per entry."""
    shape = tiny_shape()._shape()
    return values[None, :, None, None, None].expand(2, -1, 2, shape.num_kv_heads, shape.head_dim)


# ------------------------------------------------------------------------------- foreign checkpoints

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "num_hidden_layers": 2},
    "llama-tied": {},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, home: Path) -> Path:
    family = request.param.split("-")[0]
    return family_dir(home, family, name=f"drafter-{request.param}", seed=3, **FAMILIES[request.param])


def greedy(directory: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers' own model says, from scratch for each token."""
    model, ids = transformers.AutoModelForCausalLM.from_pretrained(directory).eval(), list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def proposed(drafter: DrafterImpl, prompt: list[int]) -> list[int]:
    state = drafter.new_state(1)
    for start in range(0, len(prompt) - 1, 7):
        drafter.commit(state, Commit(rows=[0], tokens=[prompt[start : min(start + 7, len(prompt) - 1)]], features=None))
    return drafts(drafter.propose(state, DraftRequest(rows=[0], anchors=prompt[-1:], num_tokens=[9])))[0]


@pytest.mark.parametrize("memory", [{"sink": 0, "window": 64, "ratio": 0}, {"sink": 9, "window": 30}], ids=str)
@pytest.mark.parametrize("length", [1, 2, 23, 38])
def test_a_window_as_long_as_the_text_drafts_what_the_model_itself_says(
    model_dir: Path, hooks: TargetHooks, memory: dict[str, int], length: int
) -> None:
    drafter, prompt = compact(model_dir, hooks, num_draft_tokens=6, **memory), text(length, seed=length).tolist()
    if memory["window"] < length + 6:
        prompt = prompt[: memory["window"] - 6]
    assert proposed(drafter, prompt) == greedy(model_dir, prompt, 6)


def test_untrained_slots_change_what_is_drafted_and_so_does_forgetting(home: Path, hooks: TargetHooks) -> None:
    """Of one text three memories make three states: with slots, without, and the whole."""
    directory = family_dir(home, "llama", name="three", seed=3)
    prompt, hidden = text(60, seed=1), []
    for memory in ({"sink": 2, "window": 8, "ratio": 3}, {"sink": 2, "window": 8, "ratio": 0}, {"window": 60}):
        drafter = compact(directory, hooks, **memory)
        batch = random_batch(drafter, (60,))
        with torch.no_grad():
            hidden.append(drafter(replace(batch, tokens=prompt[None], anchors=torch.tensor([[50]]))).hidden)
    assert not any(torch.allclose(a, b) for a, b in ((hidden[0], hidden[1]), (hidden[0], hidden[2]), hidden[1:]))


def test_an_untrained_slot_is_the_last_of_its_tokens(model_dir: Path, hooks: TargetHooks) -> None:
    """Before training the memory is that of every r-th token, keys and values and all."""
    drafter, prompt = compact(model_dir, hooks, sink=2, window=6, ratio=3, num_draft_tokens=3), text(20, seed=2)
    state = drafter.new_state(1)
    rule, num = drafter.rule, 0
    for token in prompt.tolist():
        drafter.commit(state, Commit(rows=[0], tokens=[[token]], features=None))
        if rule.num_slots(state.lengths[0]) > num:
            place = rule.sink + (state.lengths[0] - 1 - rule.sink) % rule.ring
            torch.testing.assert_close(state.slots[0][:, num], state.fixed[0, :, place], atol=1e-5, rtol=1e-4)
            num += 1
    assert num == 6


def test_mirrors_of_a_foreign_checkpoint_are_copies_and_train_alone(model_dir: Path, hooks: TargetHooks) -> None:
    drafter = compact(model_dir, hooks, sink=2, window=8, ratio=3).train()
    weights = drafter.state_dict()
    mirrors = {name for name in weights if ".slot_" in name}
    assert mirrors
    assert all(torch.equal(weights[name], weights[name.replace("slot_", "")]) for name in mirrors)
    freeze(drafter, ["layers.*.slot_*"])
    assert drafter.trains_on_text
    batch = random_batch(drafter, (40, 33), num_anchors=8)
    optimiser = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    before, first = {name: tensor.clone() for name, tensor in weights.items()}, 0.0
    for step in range(5):
        terms = drafter.loss(drafter(batch), batch)
        loss = terms.numerator / terms.denominator
        first = first if step else float(loss.detach())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < first
    assert {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])} == mirrors


def test_the_loss_is_that_of_each_token_times_the_blocks_that_hold_it(home: Path, hooks: TargetHooks) -> None:
    drafter = compact(family_dir(home, "llama", name="loss", tie_word_embeddings=False), hooks, sink=2, window=8)
    batch = random_batch(drafter, (30, 21), num_anchors=5)
    batch = replace(batch, weights=torch.rand(2, 5), loss_mask=batch.loss_mask & (batch.tokens != 4))
    out = drafter(batch)
    terms = drafter.loss(out, batch)
    rows = torch.nn.functional.cross_entropy(drafter.logits(out)[out.mask], out.labels[out.mask], reduction="none")
    weights = (out.mask * batch.weights[..., None])[out.mask]
    torch.testing.assert_close(terms.numerator, (rows * weights).sum())
    torch.testing.assert_close(terms.denominator, weights.sum())
    right = (drafter.predict(out, batch) == out.labels) & out.mask
    assert terms.metrics["acc@2"] == (float(right[..., 1].sum()), float(out.mask[..., 1].sum()))
    terms.numerator.backward()
    whole = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
    assert len(whole) == len(list(drafter.parameters())), "without train.only the model learns too, head and all"
    drafter.zero_grad()
    freeze(drafter, ["layers.*"])
    terms = drafter.loss(drafter(batch), batch)
    terms.numerator.backward()
    torch.testing.assert_close(terms.numerator.detach(), (rows * weights).sum().detach())


@pytest.mark.parametrize(
    "options",
    [{"ratio": 0}, {"ratio": 1}, {"ratio": 3, "sink": 0}, {"sink": 30}, {"attention_bias": True, "num_layers": 2},
     {"tied_head": False}, {"vocab_size": VOCAB + 5}],
    ids=str,
)  # fmt: skip
def test_training_is_serving_with_every_option(hooks: TargetHooks, options: dict[str, Any]) -> None:
    assert_training_is_serving(tiny_drafter("compact", hooks, **options))


def test_without_slots_the_memory_is_bounded(hooks: TargetHooks) -> None:
    drafter = tiny_drafter("compact", hooks, ratio=0)
    assert drafter.cost(8000).kv_bytes_per_token == 0
    assert not [name for name, _ in drafter.named_parameters() if "slot_" in name]
    batch, state = random_batch(drafter, (3000,)), drafter.new_state(1)
    for start in range(0, 3000, 1000):
        commit_spans(drafter, state, batch, {0: (start, start + 1000)}, {0: 0})
        assert state.snapshot(0)["fixed"].nbytes == drafter.cost(3000).state_bytes == state.nbytes(0)
        assert state.snapshot(0)["slots"].numel() == 0


@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_slots_take_no_more_than_cost_says(hooks: TargetHooks, ratio: int) -> None:
    drafter = tiny_drafter("compact", hooks, ratio=ratio)
    batch = random_batch(drafter, (300,))
    for length in (0, 3, 7, 299):
        saved = filled(drafter, batch, (length,)).snapshot(0)
        held = saved["fixed"].nbytes + saved["slots"].nbytes
        assert drafter.cost(length).total_bytes(length) - saved["fixed"].nbytes // 3 <= held
        assert held <= drafter.cost(length).total_bytes(length)


# ------------------------------------------------------------------------------------------ proposals


def test_confidence_is_the_probability_of_each_draft(hooks: TargetHooks) -> None:
    drafter = tiny_drafter("compact", hooks)
    batch = random_batch(drafter, (20,))
    proposal = ask(drafter, filled(drafter, batch, (14,)), (0,), [int(batch.tokens[0, 14])])
    tokens = batch.tokens.clone()
    tokens[0, 15:18] = torch.tensor(drafts(proposal)[0])
    with torch.no_grad():
        out = drafter(replace(batch, tokens=tokens, anchors=torch.tensor([[14]])))
        want = drafter.logits(out)[0, 0].softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(stated(proposal)[0]), want, atol=1e-5, rtol=1e-4)


def test_samples_follow_the_probabilities_they_state(hooks: TargetHooks) -> None:
    drafter = tiny_drafter("compact", hooks)
    batch = random_batch(drafter, (20,))
    state, anchor = filled(drafter, batch, (14,)), int(batch.tokens[0, 14])
    seen = set()
    for seed in range(6):
        draw = Draw(SamplingParams(temperature=1.5, seed=seed), 15)
        found = drafter.propose(state, DraftRequest(rows=[0], anchors=[anchor], num_tokens=[3], draws=[draw]))
        assert found.probs is not None
        assert found.probs.shape == (1, 3, VOCAB)
        torch.testing.assert_close(found.probs.sum(-1), torch.ones(1, 3, dtype=torch.float64))
        tokens = batch.tokens.clone()
        tokens[0, 15:18] = torch.tensor(drafts(found)[0])
        with torch.no_grad():
            out = drafter(replace(batch, tokens=tokens, anchors=torch.tensor([[14]])))
        want = (drafter.logits(out)[0, 0].double() / 1.5).softmax(-1)
        torch.testing.assert_close(found.probs[0], want, atol=1e-6, rtol=1e-4)
        seen.add(tuple(drafts(found)[0]))
    assert len(seen) > 1


def test_it_proposes_nothing_past_the_longest_text_of_its_model(hooks: TargetHooks) -> None:
    drafter = tiny_drafter("compact", hooks, max_positions=12)
    batch = random_batch(drafter, (20,))
    for length, room in ((8, 3), (9, 2), (11, 0), (15, 0)):
        assert len(drafts(ask(drafter, filled(drafter, batch, (length,)), (0,), [5]))[0]) == room


def test_words_the_target_does_not_have_are_never_drafted(hooks: TargetHooks) -> None:
    drafter = tiny_drafter("compact", hooks, vocab_size=VOCAB + 40)
    with torch.no_grad():
        drafter.embed_tokens.weight[VOCAB:] *= 50.0
    batch = random_batch(drafter, (30,))
    for length in range(30):
        proposal = ask(drafter, filled(drafter, batch, (length,)), (0,), [5])
        assert all(token < VOCAB for token in drafts(proposal)[0])


def test_words_that_only_the_target_has_are_read_and_never_labels(hooks: TargetHooks) -> None:
    drafter = tiny_drafter("compact", hooks, vocab_size=VOCAB - 6)
    batch = random_batch(drafter, (30,), num_anchors=6)
    batch.tokens[0, 10:13] = VOCAB - 1
    out = drafter(batch)
    assert (out.labels == VOCAB - 1).any()
    assert not out.mask[out.labels == VOCAB - 1].any()
    assert torch.isfinite(drafter.loss(out, batch).numerator)
    assert len(drafts(ask(drafter, filled(drafter, batch, (14,)), (0,), [VOCAB - 2]))[0]) == 3


# --------------------------------------------------------------------------------------------- refusals


def edited(home: Path, name: str, **changes: Any) -> Path:
    directory = family_dir(home, "llama", name=name)
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2'.*llama and qwen2"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}, "yarn"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": VOCAB * 40}, "vocabulary of 3840 tokens .* one of 96"),
        ({"num_hidden_layers": 4}, "missing tensors"),
        ({"num_hidden_layers": 2}, "unknown tensors"),
        ({"tie_word_embeddings": False}, "missing tensors: lm_head"),
    ],
)
def test_a_model_that_would_come_out_wrong_is_refused(
    home: Path, hooks: TargetHooks, changes: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    directory = edited(home, f"refused-{abs(hash(request.node.name))}", **changes)
    with pytest.raises(UserError, match=message):
        compact(directory, hooks)


def test_an_old_config_without_a_rotary_base_means_ten_thousand(home: Path, hooks: TargetHooks) -> None:
    old = edited(home, "old", rope_parameters=None)
    assert compact(old, hooks).config.rope_theta == 10_000.0
    newer = edited(home, "newer", rope_parameters=None, rope_theta=5e5)
    assert compact(newer, hooks).config.rope_theta == 5e5


def with_tokenizer(directory: Path, num_tokens: int) -> Path:
    core = Core(models.BPE(vocab={f"t{i}": i for i in range(num_tokens)}, merges=[]))
    core.save(str(directory / "tokenizer.json"))
    return directory


def test_vocabularies_may_differ_by_padding_only_where_the_tokenizer_shows_it(home: Path, hooks: TargetHooks) -> None:
    padded = family_dir(home, "llama", name="padded", vocab_size=VOCAB + 32)
    with pytest.raises(UserError, match="vocabulary of 128 tokens"):
        compact(padded, hooks)
    with pytest.raises(UserError, match="vocabulary of 128 tokens"):
        compact(with_tokenizer(padded, VOCAB + 1), hooks)
    drafter = compact(with_tokenizer(padded, VOCAB), hooks)
    assert drafter.config.vocab_size == VOCAB + 32
    far = with_tokenizer(family_dir(home, "llama", name="far", vocab_size=VOCAB + PADDING + 1), VOCAB)
    with pytest.raises(UserError, match="expected the same tokenizer"):
        compact(far, hooks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 5, "num_draft_tokens": 5}, "window is 5; expected at least 6"),
        ({"window": 8, "ratio": 8}, "window is 8; expected at least 9"),
        ({"num_heads": 3, "num_kv_heads": 2}, "heads are 3 over 2"),
        ({"head_dim": 7}, "width 7"),
    ],
)
def test_options_that_do_not_go_together_are_refused(hooks: TargetHooks, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DrafterImpl(CompactConfig(**options), hooks)
    if "ratio" not in options and "window" in options:
        DrafterImpl(CompactConfig(**options, ratio=0), hooks)


def test_another_drafters_state_is_refused(hooks: TargetHooks) -> None:
    other = tiny_drafter("lookup", hooks).new_state(1)
    with pytest.raises(HyflashError, match="compact state"):
        tiny_drafter("compact", hooks).commit(other, Commit(rows=[0], tokens=[[1]], features=None))


# ----------------------------------------------------------------------------------------- checkpoints


def test_a_saved_drafter_holds_the_model_and_loads_by_itself(home: Path, hooks: TargetHooks, tmp_path: Path) -> None:
    directory = family_dir(home, "llama", name="whole", seed=4)
    drafter = compact(directory, hooks, sink=2, window=8, ratio=3)
    assert drafter.loaded_from == directory
    checkpoint.refill(drafter)
    checkpoint.save(drafter, tmp_path / "own", dtype="fp32")
    for spec in (str(tmp_path / "own"), f"compact:{tmp_path / 'own'}"):
        loaded = checkpoint.load(spec, hooks)
        assert loaded.config == drafter.config
        assert_same_snapshot(dict(loaded.state_dict()), dict(drafter.state_dict()))
    with pytest.raises(UserError, match="says what ratio must be"):
        compact(tmp_path / "own", hooks, ratio=8)
    checkpoint.save(compact(directory, hooks, ratio=0), tmp_path / "plain", dtype="fp32")
    assert not any("slot_" in name for name in checkpoint.load(str(tmp_path / "plain"), hooks).state_dict())


def test_a_checkpoint_that_lost_its_mirrors_is_refused(hooks: TargetHooks, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint.save(tiny_drafter("compact", hooks), tmp_path, dtype="fp32")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w for name, w in weights.items() if "slot_v" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"missing tensors: .*slot_v_proj"):
        checkpoint.load(str(tmp_path), hooks)


def test_what_a_user_should_know_of_a_model_as_drafter(home: Path, hooks: TargetHooks, tmp_path: Path) -> None:
    directory = family_dir(home, "llama", name="warned")
    (found,) = checkpoint.target_warnings(directory, hooks.info, method="compact")
    assert "does not say which target" in found
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        checkpoint.target_warnings(directory, hooks.info)
    checkpoint.save(compact(directory, hooks), tmp_path, dtype="fp32")
    assert checkpoint.target_warnings(tmp_path, hooks.info) == []


def test_options_on_the_command_line_reach_a_method_over_a_checkpoint(home: Path, hooks: TargetHooks) -> None:
    directory = family_dir(home, "llama", name="options")
    make: Callable[..., Any] = api._make_drafter
    drafter = make(f"compact:{directory}", hooks, ["ratio=0", "sink=3"])
    assert (drafter.config.ratio, drafter.config.sink) == (0, 3)
    with pytest.raises(UserError, match="says what num_layers must be"):
        make(f"compact:{directory}", hooks, ["num_layers=1"])
    for spec in (str(directory), f"lookup+compact:{directory}"):
        with pytest.raises(UserError, match="NAME or NAME:CHECKPOINT"):
            make(spec, hooks, ["ratio=0"])
