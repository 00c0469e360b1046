"""Does this drafter fit this target? Proof before trust, and the likely cause when it does not.

In: a loaded target and a drafter spec. Out: a `Diagnosis`: static checks (vocabulary, taps, mask, weights, card),
then a probe: the target answers a few prompts, and the drafter is replayed over the answers. Text alone proves
nothing, since it is right with any drafter; acceptance does. A bad probe is repeated with one thing changed at a time
(taps a layer up or down, the target's rotary base, other mask tokens), and what helps names the cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from hyflash import checkpoint, hub
from hyflash.bench import workloads
from hyflash.bench.footprint import Footprint, footprints
from hyflash.core import Request, Result, SamplingParams
from hyflash.drafters.base import Drafter
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.feature_config import FeatureConfig
from hyflash.engine.decode import Engine
from hyflash.engine.replay import Recording, measure, record
from hyflash.errors import HyflashError, UserError
from hyflash.metrics import Acceptance, difference_interval, summarize
from hyflash.targets.base import Target
from hyflash.text import Tokenizer

Status = Literal["ok", "warn", "fail"]

PROBE_PROMPTS_PER_DOMAIN = 2
PROBE_TOKENS = 64
PROBE_DRAFT_TOKENS = 5
LOWEST_SHARE = 0.6
"""A probe below this share of the card's gain over plain decoding (tau - 1) is a failure: about 3 standard errors."""
LOW_TAU = 1.1
"""Below this a drafter that fits is still of no use."""
NUM_MASKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    message: str


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """All checks of one drafter; it is healthy when none failed."""

    target: str
    drafter: str
    checks: list[Check] = field(default_factory=list)
    probe: Acceptance | None = None
    expected_tau: float | None = None
    memory: list[Footprint] = field(default_factory=list)
    likely_cause: str | None = None

    @property
    def healthy(self) -> bool:
        """No check failed."""
        return all(check.status != "fail" for check in self.checks)

    def add(self, name: str, status: Status, message: str) -> None:
        """Note a check."""
        self.checks.append(Check(name=name, status=status, message=message))

    def as_dict(self) -> dict[str, Any]:
        """JSON fields."""
        return {
            "target": self.target,
            "drafter": self.drafter,
            "healthy": self.healthy,
            "likely_cause": self.likely_cause,
            "checks": [asdict(check) for check in self.checks],
            "probe": None if self.probe is None else {**asdict(self.probe), "loop_share": self.probe.loop_share},
            "expected_tau": self.expected_tau,
            "memory": [asdict(one) for one in self.memory],
        }


def examine(target: Target, tokenizer: Tokenizer, spec: str, *, name: str) -> list[Diagnosis]:
    """Diagnose each part of a drafter spec (`A+B` has two). `name` is what the user calls the target.

    Raises HyflashError when the target itself fails, UserError when it cannot take the probe's prompts.
    """
    out, loaded = [], list[tuple[Diagnosis, Drafter]]()
    answers: list[Result] = []
    for part in hub.drafter_parts(spec):
        diagnosis = Diagnosis(target=name, drafter=part)
        out.append(diagnosis)
        drafter = _load(part, target, diagnosis)
        if drafter is not None:
            answers = answers or probe_answers(target, tokenizer)
            diagnose(diagnosis, drafter, target, card=_card(part), answers=answers)
            loaded.append((diagnosis, drafter))
    _check_memory(loaded, target)
    return out


def diagnose(
    diagnosis: Diagnosis, drafter: Drafter, target: Target, *, card: dict[str, Any], answers: Sequence[Result]
) -> None:
    """Fill in the checks of one loaded drafter; `answers` are the target's to the probe's prompts."""
    _check_static(diagnosis, drafter, target)
    _check_weights(diagnosis, drafter)
    _check_card(diagnosis, drafter, target, card)
    _probe(diagnosis, drafter, target, card, answers)


# ------------------------------------------------------------------------------------- static checks


def _load(spec: str, target: Target, diagnosis: Diagnosis) -> Drafter | None:
    try:
        drafter = checkpoint.load(spec, target.hooks())
    except UserError as err:
        diagnosis.add("load", "fail", str(err))
        diagnosis.likely_cause = "it does not load: missing, damaged, or made for a target of other sizes"
        return None
    diagnosis.add("load", "ok", "loads, every tensor has its shape")
    return drafter.eval()


def _card(spec: str) -> dict[str, Any]:
    """The card of a checkpoint, with the target its config names where there is no card; {} for a bare name."""
    folder = hub.checkpoint_dir(spec)
    if folder is None:
        return {}
    if (folder / checkpoint.CARD).is_file():
        return checkpoint.read_card(folder)
    config = json.loads((folder / checkpoint.CONFIG).read_text(encoding="utf-8"))
    return {"target": config.get("hyflash", {}).get("target")}


def _check_static(diagnosis: Diagnosis, drafter: Drafter, target: Target) -> None:
    info, taps = target.info, drafter.target_layer_ids
    outside = [tap for tap in taps if not 0 <= tap <= info.num_layers]
    if outside:
        diagnosis.add("taps", "fail", f"taps {outside} are no layers of the target (0 to {info.num_layers})")
    else:
        diagnosis.add("taps", "ok", f"taps {list(taps)} of {info.num_layers} layers" if taps else "reads no features")
    if drafter.max_positions is not None and drafter.max_positions < info.max_context:
        diagnosis.add(
            "positions",
            "warn",
            f"drafts up to position {drafter.max_positions}; the target goes to {info.max_context} and decodes "
            "plainly beyond",
        )
    ids = drafter.state_dict().get("draft_ids")
    if ids is not None and ids.numel() and int(ids.max()) >= info.vocab_size:
        diagnosis.add("vocabulary", "fail", f"draft token {int(ids.max())} is beyond the target's {info.vocab_size}")
    else:
        diagnosis.add("vocabulary", "ok", f"{info.vocab_size} tokens")
    config = drafter.config
    if not isinstance(config, DFlashConfig):
        return
    mask = config.mask_token_id
    if mask is None or not 0 <= mask < info.vocab_size or mask in info.eos_token_ids:
        diagnosis.add("mask", "fail", f"mask token {mask} is no free token of the target")
    elif not bool(drafter.hooks.embed(torch.tensor([mask])).any()):
        diagnosis.add("mask", "fail", f"mask token {mask} has a zero embedding, so all slots look alike")
    else:
        diagnosis.add("mask", "ok", f"mask token {mask}")


def _check_weights(diagnosis: Diagnosis, drafter: Drafter) -> None:
    broken = [name for name, t in drafter.named_parameters() if not bool(torch.isfinite(t).all())]
    if broken:
        diagnosis.add("weights", "fail", f"{broken[0]} holds NaN or infinity ({len(broken)} tensors in all)")
        diagnosis.likely_cause = "damaged weights"
        return
    odd = odd_scales(drafter)
    if odd:
        diagnosis.add("weights", "warn", f"odd scales: {', '.join(odd[:3])}")
    elif _untrained(drafter):
        diagnosis.add("weights", "warn", "all norms are exactly 1: this drafter was never trained")
    else:
        diagnosis.add("weights", "ok", "finite" if any(True for _ in drafter.parameters()) else "has no weights")


def odd_scales(drafter: Drafter) -> list[str]:
    """Matrices whose size (rms times the root of the inputs) is 30 times off the median: broken quantisation scales.

    Zero matrices count only when their layer has others of the same kind that are not: some start at zero.
    """
    sizes = {
        name: float(t.detach().float().square().mean().sqrt()) * t.shape[-1] ** 0.5
        for name, t in drafter.named_parameters()
        if t.dim() == 2
    }
    usual = sorted(size for size in sizes.values() if size > 0)
    if len(usual) < 4:
        return []
    middle = usual[len(usual) // 2]
    return [name for name, size in sizes.items() if size > 30 * middle or 0 < size < middle / 1000]


def _untrained(drafter: Drafter) -> bool:
    norms = [t for name, t in drafter.named_parameters() if t.dim() == 1 and "norm" in name]
    return bool(norms) and all(bool((t == 1).all()) for t in norms)


def _check_card(diagnosis: Diagnosis, drafter: Drafter, target: Target, card: dict[str, Any]) -> None:
    info = target.info
    trained_for = card.get("target") or {}
    if trained_for.get("fingerprint"):
        if checkpoint.made_for(trained_for, info):
            diagnosis.add("card", "ok", f"was trained for this target ({trained_for.get('name')})")
        else:
            diagnosis.add(
                "card",
                "fail",
                f"was trained for {trained_for.get('name')} with fingerprint {trained_for['fingerprint']}; this "
                f"target has {info.fingerprint}",
            )
            diagnosis.likely_cause = f"the drafter belongs to another model, {trained_for.get('name')}"
    elif drafter.target_layer_ids:
        diagnosis.add("card", "warn", "has no card that says which target it was trained for")
    config = drafter.config
    if isinstance(config, FeatureConfig):
        recorded = card.get("target_layer_ids")
        if recorded is not None and tuple(recorded) != drafter.target_layer_ids:
            diagnosis.add(
                "card taps", "fail", f"reads layers {list(drafter.target_layer_ids)}; trained on {list(recorded)}"
            )
            diagnosis.likely_cause = f"wrong taps: set target_layer_ids to {list(recorded)}"
        if config.rope_theta != info.rope_theta:
            # A recipe that sets no base means the target's: then this config is not the one that was trained.
            recipe = (card.get("recipe") or {}).get("drafter")
            altered = recipe is not None and not recipe.get("rope_theta")
            message = f"rotary base is {config.rope_theta:g}; the target's is {info.rope_theta:g}"
            diagnosis.add("rope", "fail" if altered else "warn", message)


def _check_memory(loaded: Sequence[tuple[Diagnosis, Drafter]], target: Target) -> None:
    all_bytes = footprints([drafter for _, drafter in loaded], target)
    for (diagnosis, _), own in zip(loaded, all_bytes, strict=True):
        diagnosis.memory = own
        wrong = next((one for one in own if one.measured_bytes not in (None, one.computed_bytes)), None)
        held = [f"{one.context:,}" for one in own if one.measured_bytes is not None]
        if wrong is not None:
            found_bytes = f"{wrong.measured_bytes} bytes found after {wrong.context:,} tokens"
            diagnosis.add("memory", "warn", f"{found_bytes}, {wrong.computed_bytes} computed")
        elif held:
            diagnosis.add("memory", "ok", f"bytes found after {' and '.join(held)} tokens are those computed")


# ---------------------------------------------------------------------------------------------- probe


def probe_answers(target: Target, tokenizer: Tokenizer) -> list[Result]:
    """What the target says to a few prompts of ours, greedily. Raises UserError, HyflashError as `examine`."""
    engine = Engine(target, tokenizer=tokenizer)
    requests = []
    for domain, prompts in workloads.read([workloads.DEMO], limit=PROBE_PROMPTS_PER_DOMAIN).items():
        for ids in workloads.natural(domain, prompts, tokenizer).prompts:
            room = target.info.max_context - len(ids)
            if room > 1:
                params = SamplingParams(max_tokens=min(PROBE_TOKENS, room), ignore_eos=True)
                requests.append(Request(prompt_ids=ids, params=params))
    if not requests:
        raise UserError(f"the context of {target.info.name} is too short for the probe's prompts.")
    results = engine.generate(requests)
    for result in results:
        if result.error is not None:
            raise HyflashError(f"the target fails by itself: {result.error}")
    return results


def _probe(
    diagnosis: Diagnosis, drafter: Drafter, target: Target, card: dict[str, Any], answers: Sequence[Result]
) -> None:
    recordings = _Recordings(target, drafter, answers)
    length = min(PROBE_DRAFT_TOKENS, drafter.max_draft_tokens)
    base = measure(drafter, recordings.shifted(0), length, target=target)
    diagnosis.probe = summarize(base)
    diagnosis.expected_tau = _expected(card)
    better = _better_variant(drafter, recordings, base, length, search=_is_low(diagnosis))
    _judge(diagnosis, drafter, better)


def _expected(card: dict[str, Any]) -> float | None:
    tau = card.get("tau")
    return float(tau) if isinstance(tau, int | float) else None


def _is_low(diagnosis: Diagnosis) -> bool:
    probe, expected = diagnosis.probe, diagnosis.expected_tau
    assert probe is not None
    if probe.num_drafted == 0 or probe.num_accepted == 0:
        return True
    return expected is not None and probe.tau - 1 < LOWEST_SHARE * (expected - 1)


def _judge(diagnosis: Diagnosis, drafter: Drafter, better: str | None) -> None:
    """Turn the probe's numbers into one check and, if bad, a cause."""
    probe, expected = diagnosis.probe, diagnosis.expected_tau
    assert probe is not None
    beside = f"; its card says {expected:.2f}" if expected is not None else ""
    found = f"{probe.tau:.2f} tokens per round over {probe.num_rounds} rounds{beside}"
    if probe.num_drafted == 0 and not drafter.target_layer_ids:
        diagnosis.add("probe", "warn", "found nothing to draft in the probe's short answers")
    elif probe.num_accepted == 0:
        what = "not one draft token was accepted" if probe.num_drafted else "it proposed nothing at all"
        diagnosis.add("probe", "fail", f"acceptance length is exactly {probe.tau:.3f}: {what}{beside}")
    elif _is_low(diagnosis):
        diagnosis.add("probe", "fail", f"{found}; expected at least {LOWEST_SHARE:.0%} of that gain over 1")
    elif better is not None:
        diagnosis.add("probe", "fail", f"{found}; clearly better with a change: {better}")
    elif probe.num_accepted == probe.num_drafted:
        diagnosis.add("probe", "warn", f"{found}; every draft was accepted, so this probe tells little")
    elif probe.tau < LOW_TAU:
        diagnosis.add("probe", "warn", f"{found}; too few drafts are accepted to make decoding faster")
    else:
        diagnosis.add("probe", "ok", found)
    if diagnosis.healthy or diagnosis.likely_cause is not None:
        return
    warned = {check.name: check.message for check in diagnosis.checks if check.status != "ok"}
    if better is not None:
        diagnosis.likely_cause = better
    elif "weights" in warned:
        diagnosis.likely_cause = warned["weights"]
    elif "rope" in warned:
        diagnosis.likely_cause = warned["rope"]
    else:
        diagnosis.likely_cause = "the weights do not fit this target: random, damaged, or trained for another model"


# ------------------------------------------------------------------------------------------- variants


class _Recordings:
    """The answers with features at the taps, and at the layers beside them."""

    def __init__(self, target: Target, drafter: Drafter, answers: Sequence[Result]) -> None:
        self.taps = drafter.target_layer_ids
        self._last = target.info.num_layers
        wanted = {self._moved(tap, by) for tap in self.taps for by in (-1, 0, 1)}
        self._all = tuple(sorted(wanted))
        kv = drafter.target_kv_layers
        self._recordings = [record(target, self._all, a.prompt_ids, a.token_ids, kv_layers=kv) for a in answers]

    def _moved(self, tap: int, by: int) -> int:
        """The tap `by` layers away; the state after the final norm has no neighbour."""
        return tap if tap == self._last else min(max(tap + by, 0), self._last - 1)

    def shifted(self, by: int) -> list[Recording]:
        """Recordings that show the drafter the layers `by` away under its own taps' names."""
        picks = [self._all.index(self._moved(tap, by)) for tap in self.taps]
        return [
            replace(r, features=None if r.features is None else r.features[:, picks], taps=self.taps)
            for r in self._recordings
        ]


def _better_variant(
    drafter: Drafter, recordings: _Recordings, base: Sequence[Result], length: int, *, search: bool
) -> str | None:
    """The change that helps most, if one helps beyond doubt (95 % interval over prompts above 0)."""
    best: tuple[float, str] | None = None
    for what, variant, shift in _variants(drafter, search=search):
        got = difference_interval(measure(variant, recordings.shifted(shift), length), base)
        if got.low > 0 and (best is None or got.value > best[0]):
            best = got.value, f"{what} ({got.value:+.2f} tokens per round)"
    return best[1] if best else None


def _variants(drafter: Drafter, *, search: bool) -> Iterator[tuple[str, Drafter, int]]:
    """(what it would mean, drafter, tap shift); mask tokens only when `search`."""
    if not drafter.target_layer_ids:
        return
    taps, last = drafter.target_layer_ids, drafter.hooks.info.num_layers
    for shift in (-1, 1):
        right = [tap if tap == last else tap + shift for tap in taps]
        yield f"wrong taps: features fit layers {right} better than {list(taps)}", drafter, shift
    config = drafter.config
    if not isinstance(config, FeatureConfig):
        return
    theta = drafter.hooks.info.rope_theta
    if config.rope_theta != theta:
        yield (
            f"wrong rotary base: {theta:g} (the target's) fits, not {config.rope_theta:g}",
            _changed(drafter, {"rope_theta": theta}),
            0,
        )
    if search and isinstance(config, DFlashConfig):
        for token in _masks(drafter, config):
            yield (
                f"wrong mask token: {token} fits, not {config.mask_token_id}",
                _changed(drafter, {"mask_token_id": token}),
                0,
            )


def _masks(drafter: Drafter, config: DFlashConfig) -> list[int]:
    """Other likely mask tokens: the last and the first of the vocabulary, where reserved tokens are."""
    info = drafter.hooks.info
    near = [*range(info.vocab_size - 1, info.vocab_size - 1 - NUM_MASKS // 2, -1), *range(NUM_MASKS)]
    return [t for t in near if t >= 0 and t != config.mask_token_id and t not in info.eos_token_ids]


def _changed(drafter: Drafter, update: dict[str, Any]) -> Drafter:
    """A copy of the drafter with other options and the same weights."""
    config = drafter.config.model_copy(update=update)
    copy = type(drafter)(config, drafter.hooks)
    copy.load_state_dict(drafter.state_dict())
    return copy.eval()
