"""Checkpoints: what is saved loads the same, z-lab's format both ways, and every fault has its sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from block_fakes import DIM, VOCAB, ask, commit_prefix, fake_batch, fake_hooks, fake_info
from drafting import drafts
from hyflash import checkpoint
from hyflash.core import TargetHooks
from hyflash.drafters import dflash, hyflash
from hyflash.drafters.base import Drafter
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.compose import Composite
from hyflash.drafters.hyflash import HyFlashConfig
from hyflash.errors import NonFiniteError, UserError
from published import zlab_reference

SMALL: dict[str, Any] = {"num_layers": 2, "num_draft_tokens": 3, "num_taps": 2}
PLAIN: dict[str, Any] = {**SMALL, "tap_norm": False}


def hooks(**changes: object) -> TargetHooks:
    return fake_hooks(**{"num_layers": 8, **changes})


def random_weights(drafter: Drafter) -> Drafter:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter.eval()


def make_dflash(**options: Any) -> dflash.DrafterImpl:
    drafter = dflash.DrafterImpl(DFlashConfig(**{**SMALL, **options}), hooks())
    random_weights(drafter)
    return drafter


def make_hyflash(**options: Any) -> hyflash.DrafterImpl:
    drafter = hyflash.DrafterImpl(HyFlashConfig(**{**SMALL, "window": 8, **options}), hooks())
    random_weights(drafter)
    return drafter


def same_weights(a: Drafter, b: Drafter) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def zlab_dir(tmp_path: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """A checkpoint as z-lab would write it: no block of ours, some keys changed or dropped."""
    path = tmp_path / "zlab"
    checkpoint.save(make_dflash(**PLAIN), path, dtype="fp32")
    config = json.loads((path / "config.json").read_text())
    del config["hyflash"]
    config = {key: value for key, value in {**config, **changes}.items() if key not in drop}
    (path / "config.json").write_text(json.dumps(config))
    return path


# ------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    "drafter",
    [
        lambda: make_dflash(**PLAIN),
        lambda: make_dflash(start="ridge", correction="gru", draft_vocab_size=9),
        lambda: make_dflash(start="ridge", start_rank=4, correction="markov", window=5, num_layers=3, full_layers=(2,)),
        make_hyflash,
        lambda: make_hyflash(memory_core="mamba2", memory_heads=3),
    ],
)
def test_a_saved_drafter_loads_bit_for_bit_in_fp32_and_close_in_fp16(drafter: Any, tmp_path: Path) -> None:
    made = drafter()
    checkpoint.save(made, tmp_path / "a", card={"tau": 1.5}, dtype="fp32")
    loaded = checkpoint.load(str(tmp_path / "a"), hooks())
    assert type(loaded) is type(made)
    assert loaded.config == made.config
    assert same_weights(made, loaded)
    assert not loaded.training
    assert checkpoint.read_card(tmp_path / "a") == {"tau": 1.5}
    checkpoint.save(made, tmp_path / "b")
    half = checkpoint.load(str(tmp_path / "b"), hooks())
    for name, tensor in half.state_dict().items():
        torch.testing.assert_close(tensor, made.state_dict()[name], atol=1e-3, rtol=1e-3)
        if tensor.dim() == 1:
            assert torch.equal(tensor, made.state_dict()[name])  # norms and gates stay whole
    assert (tmp_path / "b" / "model.safetensors").stat().st_size < (tmp_path / "a" / "model.safetensors").stat().st_size
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]


def test_draft_vocabulary_is_saved_and_served_after_loading(tmp_path: Path) -> None:
    made = make_dflash(draft_vocab_size=4)
    ids = torch.tensor([44, 3, 17, 29])
    made.set_draft_vocab(ids)
    checkpoint.save(made, tmp_path, dtype="fp32")
    loaded = checkpoint.load(str(tmp_path), hooks())
    batch = fake_batch(made, lengths=(9,))
    proposals = []
    for drafter in (made, loaded):
        state = drafter.new_state(1)
        commit_prefix(drafter, state, batch, [5])
        proposals.append(drafter.propose(state, ask(batch.tokens[:, 5])))
    assert drafts(proposals[0]) == drafts(proposals[1])
    assert set(drafts(proposals[1])[0]) <= {*ids.tolist(), *batch.tokens[0, :6].tolist()}


def test_loading_weights_forgets_the_head_rows_of_the_old_list() -> None:
    first, second = make_dflash(draft_vocab_size=2), make_dflash(draft_vocab_size=2)
    second.set_draft_vocab(torch.tensor([40, 41]))
    state = first.new_state(1)
    first.propose(state, ask([40]))
    first.load_state_dict(second.state_dict())
    assert set(drafts(first.propose(state, ask([40])))[0]) <= {40, 41}


def test_a_second_save_replaces_the_first_and_drops_its_card(tmp_path: Path) -> None:
    checkpoint.save(make_dflash(), tmp_path, card={"tau": 2.0})
    other = make_hyflash()
    checkpoint.save(other, tmp_path, dtype="fp32")
    assert same_weights(checkpoint.load(str(tmp_path), hooks()), other)
    with pytest.raises(UserError, match=r"card\.json: cannot be read"):
        checkpoint.read_card(tmp_path)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_dflash()
    checkpoint.save(made, tmp_path, dtype="fp32")

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(make_dflash(num_draft_tokens=2), tmp_path)
    assert same_weights(checkpoint.load(str(tmp_path), hooks()), made)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


# ------------------------------------------------------------------------------------------------- names


def test_specs_name_methods_checkpoints_and_compositions(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "plus+sign"
    checkpoint.save(make_hyflash(), first)
    checkpoint.save(make_dflash(), second)
    assert type(checkpoint.load("hyflash", hooks())) is hyflash.DrafterImpl
    assert type(checkpoint.load(str(second), hooks())) is dflash.DrafterImpl
    both = checkpoint.load(f"lookup+{first}", hooks())
    assert isinstance(both, Composite)
    assert both.names == ("lookup", "hyflash")
    twice = checkpoint.load(f"{first}+hyflash:{first}", hooks())
    assert isinstance(twice, Composite)
    assert twice.names == (str(first), f"hyflash:{first}")
    with pytest.raises(UserError, match="not one checkpoint"):
        checkpoint.save(both, tmp_path / "both")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hyflsh", r"unknown drafter 'hyflsh'\. Did you mean 'hyflash'\?"),
        ("./nowhere", r"\./nowhere: no such directory"),
        ("hyflash:./nowhere", r"\./nowhere: no such directory"),
        ("hyflash:", r"\(nothing\): no such directory"),
        ("lookup+", "unknown drafter ''"),
        ("nope:./x", r"nope:\./x: no such directory"),
    ],
)
def test_unknown_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        checkpoint.load(spec, hooks())


def test_dflash_weights_upgrade_to_hyflash_with_a_silent_memory(tmp_path: Path) -> None:
    plain = make_dflash(window=6)
    checkpoint.save(plain, tmp_path, dtype="fp32")
    upgraded = checkpoint.load(f"hyflash:{tmp_path}", hooks())
    assert isinstance(upgraded, hyflash.DrafterImpl)
    assert upgraded.config.window == 6
    assert upgraded.config.memory_core == "delta"
    batch = fake_batch(plain, lengths=(30, 7))
    assert torch.equal(upgraded(batch).hidden, plain(batch).hidden)
    full = make_dflash()
    checkpoint.save(full, tmp_path, dtype="fp32")
    assert checkpoint.load(f"hyflash:{tmp_path}", hooks()).config.window == 256  # type: ignore[attr-defined]


def test_hyflash_weights_do_not_fit_dflash(tmp_path: Path) -> None:
    checkpoint.save(make_hyflash(), tmp_path)
    with pytest.raises(UserError, match="unknown option 'memory_core'"):
        checkpoint.load(f"dflash:{tmp_path}", hooks())


# -------------------------------------------------------------------------------------------------- z-lab


@pytest.mark.parametrize("anchor_drafts", [False, True])
def test_a_foreign_dflash_computes_what_its_own_code_computes(anchor_drafts: bool, tmp_path: Path) -> None:
    path = zlab_dir(tmp_path, **({"sample_from_anchor": True} if anchor_drafts else {}))
    drafter = checkpoint.load(str(path), hooks())
    assert isinstance(drafter, dflash.DrafterImpl)
    assert drafter.max_draft_tokens == (4 if anchor_drafts else 3)
    config, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    assert len(weights) == 11 * 2 + 3
    batch = fake_batch(drafter, lengths=(21,))
    for anchor in (1, 20):
        state = drafter.new_state(1)
        commit_prefix(drafter, state, batch, [anchor])
        got = drafter.block_hidden(state, ask(batch.tokens[:, anchor]))[0]
        want = zlab_reference(hooks(), config, weights, batch, anchor)[0 if anchor_drafts else 1 :]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_plain_dflash_is_written_in_zlab_format(tmp_path: Path) -> None:
    checkpoint.save(make_dflash(**PLAIN), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"]["target_layer_ids"] == [1, 5]
    assert config["dflash_config"]["mask_token_id"] == VOCAB - 1
    assert config["is_causal"] is False
    assert config["num_target_layers"] == 8
    assert config["layer_types"] == ["full_attention"] * 2
    assert Qwen3Config(**{k: v for k, v in config.items() if k != "hyflash"}).num_key_value_heads == 2
    assert config["hyflash"]["drafter_type"] == "dflash"


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 6}, {"correction": "gru"}, {"start": "ridge"}, {"draft_vocab_size": 8}, {"target_layer_ids": (7,)}],
)
def test_what_zlab_format_cannot_hold_does_not_claim_it(options: dict[str, Any], tmp_path: Path) -> None:
    drafter = make_dflash(**{**(PLAIN if options else SMALL), **options})
    checkpoint.save(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["HyFlashDraftModel"]
    assert "dflash_config" not in config


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 7, "window_counts_slots": True},
        {"window": 7, "window_counts_slots": True, "causal_block": True},
        {"causal_block": True},
        {"window": 7, "window_counts_slots": True, "causal_block": True, "full_layers": (1,)},
        {"window": 7, "window_counts_slots": True, "full_layers": (0,)},
        {"attention_bias": True},
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_zlab_round_trip_nested_and_flat(options: dict[str, Any], flat: bool, tmp_path: Path) -> None:
    drafter = make_dflash(**{**PLAIN, **options})
    checkpoint.save(drafter, tmp_path, dtype="fp32")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["hyflash"]
    if flat:
        config |= config.pop("dflash_config")
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    else:
        del config["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = checkpoint.load(str(tmp_path), hooks())
    assert loaded.config == drafter.config.model_copy(update={"num_taps": 5})
    assert same_weights(loaded, drafter)


def test_default_taps_of_a_foreign_checkpoint_follow_its_depth(tmp_path: Path) -> None:
    path = zlab_dir(tmp_path, dflash_config={"mask_token_id": 9})
    assert checkpoint.load(str(path), hooks()).target_layer_ids == (1, 5)


def test_layer_type_rules_of_foreign_windows(tmp_path: Path) -> None:
    def config(*drop: str, **changes: Any) -> DFlashConfig:
        path = zlab_dir(tmp_path, drop=("is_causal", *drop), use_sliding_window=True, **changes)
        loaded = checkpoint.load(str(path), hooks()).config
        assert isinstance(loaded, DFlashConfig)
        return loaded

    sliding, full = "sliding_attention", "full_attention"
    mixed = config(layer_types=[sliding, full], sliding_window=7)
    assert (mixed.window, mixed.window_counts_slots, mixed.causal_block, mixed.full_layers) == (7, True, True, (1,))
    nested = json.loads((tmp_path / "zlab" / "config.json").read_text())["dflash_config"]
    forced = config(dflash_config={**nested, "use_swa": True, "swa_window_size": 9})
    assert (forced.window, forced.causal_block, forced.full_layers) == (9, False, ())
    stated = config(dflash_config={**nested, "causal": False}, layer_types=[sliding] * 2, sliding_window=7)
    assert (stated.window, stated.causal_block, stated.full_layers) == (7, False, ())
    old = config("layer_types", sliding_window=7, max_window_layers=1)
    assert (old.window, old.full_layers) == (7, (0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash3DraftModel"]}, "architectures names 'DFlash3DraftModel'"),
        ({"architectures": ["DFlash2DraftModel"]}, "conv_group_size is None; expected a whole number"),
        ({"dflash_config": {"conv_kernel_size": 2}}, r"dflash_config\.conv_kernel_size is 2, which we cannot honour"),
        ({"dflash_config": {"selector_rank": 256}}, r"dflash_config\.selector_rank"),
        ({"dflash_config": {"projector_type": "dfly"}}, "projector_type is 'dfly'"),
        ({"sample_from_anchor": False, "dflash_config": {"sample_from_anchor": True}}, "sample_from_anchor is False"),
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias is True"),
        ({"dflash_config": {"brand_new": 1}}, r"dflash_config\.brand_new is unknown"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling is .*yarn.* cannot honour"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters is .*yarn"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
        ({"num_target_layers": 36}, "num_target_layers is 36; target 'fake' has 8"),
        ({"vocab_size": 9}, "vocab_size is 9; target 'fake' has 61"),
        ({"hidden_size": 64}, "hidden_size is 64; target 'fake' has 32"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32"),
        ({"block_size": 9}, "block_size is 9 at the top and 4 in dflash_config"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 5]}}, "mask_token_id is 0"),
        ({"dflash_config": {"mask_token": "<|MASK|>"}}, "give mask_token_id"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 7]}}, r"target_layer_ids is \[1, 7\]"),
        ({"dflash_config": {"target_layer_ids": [1, 5]}}, "mask_token_id is missing"),
        ({"dflash_config": 3}, "dflash_config is 3"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 7}, "use_sliding_window is false"),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, "sliding_window is None"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types is"),
        ({"architectures": [["DFlashDraftModel"]]}, "architectures is .*expected a list of names"),
        ({"use_sliding_window": True, "layer_types": None, "max_window_layers": "1"}, "max_window_layers is '1'"),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 7,
                "use_sliding_window": True,
                "is_causal": True,
            },
            "is_causal is true with full and sliding",
        ),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; expected a table"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": 3}}, "target_layer_ids is 3"),
        ({"architectures": "DFlashDraftModel"}, "architectures is 'DFlashDraftModel'; expected a list of names"),
        ({"architectures": 1}, "architectures is 1; expected a list of names"),
        (
            {"layer_types": [["full_attention"]] * 2},
            r"layer_types is \[\['full_attention'\], .*; expected a list of names",
        ),
        ({"layer_types": 2}, "layer_types is 2; expected a list of names"),
        ({"projector_type": ["domino"]}, r"projector_type is \['domino'\]; expected a name"),
        ({"is_causal": "false"}, "is_causal is 'false'; expected true or false"),
        ({"attention_bias": [0]}, r"attention_bias is \[0\]; expected true or false"),
        ({"layer_types": None, "use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers is '1'"),
        ({"intermediate_size": 0}, "intermediate_size is 0; expected a whole number of at least 1"),
        ({"head_dim": 10**20}, "head_dim is 10+; expected a whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; expected a number above 0"),
    ],
)
def test_foreign_settings_we_cannot_honour_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        checkpoint.load(str(zlab_dir(tmp_path, **changes)), hooks())


def test_foreign_names_with_prefix_and_fused_projections_are_read(tmp_path: Path) -> None:
    path = zlab_dir(tmp_path)
    weights = load_file(path / "model.safetensors")
    want = checkpoint.load(str(path), hooks())
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not any(f".{part}_proj" in name for part in "qkv"):
            fused[f"model.{name}"] = tensor
    for i in range(2):
        parts = [weights[f"layers.{i}.self_attn.{part}_proj.weight"] for part in "qkv"]
        fused[f"model.layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    save_file(fused, path / "model.safetensors")
    assert same_weights(checkpoint.load(str(path), hooks()), want)


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    path = zlab_dir(tmp_path)
    want = checkpoint.load(str(path), hooks())
    weights = load_file(path / "model.safetensors")
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: t for name, t in weights.items() if files[name] == file}, path / file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert same_weights(checkpoint.load(str(path), hooks()), want)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        checkpoint.load(str(path), hooks())


def test_a_mask_vector_of_its_own_is_refused(tmp_path: Path) -> None:
    path = zlab_dir(tmp_path)
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match="mask vector of its own"):
        checkpoint.load(str(path), hooks())


# ------------------------------------------------------------------------------------------------- faults


def edit(path: Path, change: Any) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("norm.weight"), r"missing tensors: norm\.weight"),
        (lambda w: w.update(strange=torch.ones(2)), "unknown tensors: strange"),
        (
            lambda w: w.update({"fc.weight": torch.ones(DIM, 3)}),
            r"wrong shapes: fc\.weight \(32, 3\), expected \(32, 64\)",
        ),
        (lambda w: w.update({k: v.to(torch.float8_e4m3fn) for k, v in w.items()}), r"of torch.float8_e4m3fn, expected"),
        (lambda w: w.update({"draft_ids": torch.ones(4)}), r"draft_ids \(4,\), expected \(4,\) of whole numbers"),
        (lambda w: w.update({"draft_ids": torch.tensor([1, 1, 2, 3])}), "4 distinct token ids"),
        (lambda w: w["fc.weight"].fill_(float("nan")), r"fc\.weight holds NaN"),
        (lambda w: [w.pop(n) for n in [n for n in w if "layers.0" in n]], "and 6 more"),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    checkpoint.save(make_dflash(draft_vocab_size=4), tmp_path, dtype="fp32")
    edit(tmp_path, change)
    with pytest.raises(UserError, match=message):
        checkpoint.load(str(tmp_path), hooks())


def test_an_upgrade_forgives_missing_memory_only(tmp_path: Path) -> None:
    checkpoint.save(make_dflash(), tmp_path, dtype="fp32")
    edit(tmp_path, lambda w: w.pop("norm.weight"))
    with pytest.raises(UserError, match=r"missing tensors: norm\.weight"):
        checkpoint.load(f"hyflash:{tmp_path}", hooks())
    checkpoint.save(make_hyflash(), tmp_path, dtype="fp32")
    edit(tmp_path, lambda w: w.pop("layers.0.memory.A_log"))
    with pytest.raises(UserError, match=r"missing tensors: layers\.0\.memory\.A_log"):
        checkpoint.load(str(tmp_path), hooks())


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights_are_refused(keep: int, tmp_path: Path) -> None:
    checkpoint.save(make_dflash(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors: is cut short or damaged"):
        checkpoint.load(str(tmp_path), hooks())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ('{"hyflash": 3}', "names no target"),
        ('{"hyflash": {"format": 9, "target": {}}}', "format is 9; this version of hyflash reads 1"),
        ("{}", "block_size is missing"),
    ],
)
def test_a_damaged_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    checkpoint.save(make_dflash(), tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        checkpoint.load(str(tmp_path), hooks())


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        checkpoint.load(str(tmp_path), hooks())
    checkpoint.save(make_dflash(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        checkpoint.load(str(tmp_path), hooks())


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_layers"])
def test_a_checkpoint_of_another_target_is_refused(key: str, tmp_path: Path) -> None:
    checkpoint.save(make_dflash(), tmp_path)
    other = hooks(**{key: 16})
    with pytest.raises(UserError, match=f"was trained for target 'fake' with {key} .*; target 'fake' has 16"):
        checkpoint.load(str(tmp_path), other)
    with pytest.raises(UserError, match=key):
        checkpoint.target_warnings(tmp_path, other.info)


def test_another_fingerprint_is_a_warning(tmp_path: Path) -> None:
    checkpoint.save(make_dflash(**PLAIN), tmp_path)
    info = fake_info(num_layers=8)
    assert checkpoint.target_warnings(tmp_path, info) == []
    (found,) = checkpoint.target_warnings(tmp_path, replace(info, fingerprint="beef"))
    assert "fingerprint f00d; 'fake' has beef" in found
    (foreign,) = checkpoint.target_warnings(zlab_dir(tmp_path), info)
    assert "does not say which target" in foreign


def test_other_files_of_the_same_weights_are_no_warning(tmp_path: Path) -> None:
    checkpoint.save(make_dflash(**PLAIN), tmp_path)
    info = replace(fake_info(num_layers=8), fingerprint="beef")
    config = json.loads((tmp_path / "config.json").read_text())
    for also, num_warnings in ((["cafe", "beef"], 0), (["cafe"], 1), ("beef", 1), (None, 1)):
        config["hyflash"]["target"]["also"] = also
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert len(checkpoint.target_warnings(tmp_path, info)) == num_warnings


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    drafter = make_dflash()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"fc\.weight holds NaN or infinity"):
        checkpoint.save(drafter, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_values_beyond_half_precision_stay_whole(tmp_path: Path) -> None:
    drafter = make_dflash()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e6
    checkpoint.save(drafter, tmp_path)
    loaded = checkpoint.load(str(tmp_path), hooks())
    assert torch.equal(loaded.state_dict()["fc.weight"], drafter.fc.weight)
