"""The promise: with any drafter, width, batch and prefill the text is that of plain decoding, on every model family.

Small enough for each run of the suite; `benchmarks/exactness_sweep.py` is the same at length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafting import KINDS, HalfRight, tiny_drafter
from families import FAMILIES, VOCAB, char_tokenizer, family_dir, text
from hyflash.core import DraftRequest, Proposal, Request, Result, SamplingParams
from hyflash.drafters.base import State
from hyflash.engine.decode import Engine
from hyflash.engine.length import AdaptiveLength, FixedLength
from hyflash.targets import hf
from hyflash.targets.base import Target
from native_models import MODELS as NATIVE_MODELS
from native_models import needs_kernels

pytestmark = pytest.mark.usefixtures("own_cache")
torch.set_num_threads(1)
WIDTHS = (1, 2, 4, 8, 16)
NATIVE = ("llama", "mistral", "qwen3", "gemma2")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    # An inner width of 48 ends in a scalar tail of the elementwise kernels: rows are not invariant there.
    "llama-recheck": ("llama", {"intermediate_size": 48}),
    **{f"native-{name}": NATIVE_MODELS[name] for name in NATIVE},
}
EACH_MODEL = [pytest.param(m, marks=needs_kernels if m.startswith("native-") else ()) for m in MODELS]


def load(path: Path, model: str) -> Target:
    """The model's target; quantised weights and keys on the kernels, where not even they may reach the text."""
    if not model.startswith("native-"):
        return hf.load(str(path))
    from hyflash.targets import native

    turn = list(MODELS).index(model)
    quant, kv = ("q8_0", "none", "q4_0", "q4_1")[turn % 4], ("float16", "int8", "bfloat16", "float32")[turn % 4]
    return native.load(path, quant=quant, kv=kv, num_threads=1)


class Reference:
    """A target, four ragged requests of different settings, and their plain answers, one request at a time."""

    def __init__(self, path: Path, model: str) -> None:
        self.target = load(path, model)
        prompts = [tuple(text(n, seed=n).tolist()) for n in (1, 13, 40, 6)]
        first = self._plain(prompts[3], {})
        settings: list[dict[str, Any]] = [
            {},
            {"temperature": 0.9, "top_p": 0.9, "seed": 7},
            {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "logit_bias": {9: 0.5}, "logprobs": 2},
            {"stop": (first.text[14:16], first.text[17:19]), "min_tokens": 9},
        ]
        self.plain = [self._plain(p, s) for p, s in zip(prompts, settings, strict=True)]
        self.requests = [self._request(p, s) for p, s in zip(prompts, settings, strict=True)]
        assert self.plain[3].finish_reason == "stop"

    def _request(self, prompt: tuple[int, ...], settings: dict[str, Any]) -> Request:
        return Request(prompt_ids=prompt, params=SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **settings}))

    def _plain(self, prompt: tuple[int, ...], settings: dict[str, Any]) -> Result:
        return self.engine(None).generate([self._request(prompt, settings)])[0]

    def engine(self, drafter: Any, **options: Any) -> Engine:
        return Engine(self.target, drafter, tokenizer=char_tokenizer(), **options)

    def texts(self) -> list[list[int]]:
        return [[*r.prompt_ids, *r.token_ids] for r in self.plain]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def build(model: str) -> Reference:
        family, changes = MODELS[model]
        return Reference(family_dir(tmp_path_factory.mktemp("exact"), family, name=model, **changes), model)

    return build


def assert_same(got: Sequence[Result], want: Sequence[Result]) -> None:
    for result, plain in zip(got, want, strict=True):
        assert result.token_ids == plain.token_ids
        assert (result.text, result.finish_reason) == (plain.text, plain.finish_reason)
        assert [p.token_id for p in result.logprobs] == [p.token_id for p in plain.logprobs]
        for one, other in zip(result.logprobs, plain.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", EACH_MODEL)
def test_text_is_that_of_plain_decoding(model: str, kind: str, reference: Any) -> None:
    """One ragged batch a model and drafter; width, prefill chunk, late joining and draft quality go round."""
    known: Reference = reference(model)
    turn = list(MODELS).index(model) + list(KINDS).index(kind)
    spec, options = KINDS[kind]
    drafter = tiny_drafter(spec, known.target.hooks(), **options)
    helped = HalfRight(drafter, known.texts(), seed=turn)
    engine = known.engine(
        helped, policy=FixedLength(15), prefill_chunk=(4, 9, 512)[turn % 3], max_rows=(4, 2)[turn % 2]
    )
    mixed = [  # every row of the batch drafts at a width of its own
        Request(prompt_ids=r.prompt_ids, params=r.params, num_draft_tokens=WIDTHS[(turn + i) % 5] - 1)
        for i, r in enumerate(known.requests)
    ]
    results = engine.generate(mixed)
    assert_same(results, known.plain)
    assert sum(trace.num_accepted for r in results for trace in r.rounds) > 0
    alone = turn % 4
    engine = known.engine(drafter, policy=FixedLength(WIDTHS[1 + turn % 4] - 1))
    assert_same(engine.generate([known.requests[alone]]), [known.plain[alone]])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "model", ["gemma2", "llama-recheck", *(pytest.param(f"native-{name}", marks=needs_kernels) for name in NATIVE)]
)
def test_every_width_gives_the_same_text(model: str, width: int, reference: Any) -> None:
    known: Reference = reference(model)
    helped = HalfRight(tiny_drafter("hyflash", known.target.hooks()), known.texts(), seed=width)
    for requests, plain in ((known.requests, known.plain), (known.requests[1:2], known.plain[1:2])):
        results = known.engine(helped, policy=FixedLength(width - 1)).generate(requests)
        assert_same(results, plain)
        if width == 1:
            assert all(len(r.rounds) == len(r.token_ids) for r in results)


def test_the_model_with_variant_rows_is_rechecked(reference: Any) -> None:
    target = reference("llama-recheck").target
    assert target.exactness == "recheck"
    assert 0 < target.epsilon < 1e-2
    assert reference("llama").target.exactness == "invariant"


def test_half_precision_texts_are_those_of_plain_decoding_without_company(tmp_path: Path) -> None:
    """Keys and values of rows that shared a forward are off by a rounding, which decides ties: here they did."""
    shape = {"hidden_size": 80, "intermediate_size": 208}
    target = hf.load(str(family_dir(tmp_path, "llama", **shape)), dtype="bfloat16")
    assert target.exactness == "recheck"
    requests = [
        Request(prompt_ids=tuple(text(n, seed=i).tolist()), params=SamplingParams(max_tokens=20, ignore_eos=True))
        for i, n in enumerate((5, 12))
    ]
    plain = [Engine(target).generate([request])[0] for request in requests]
    assert_same(Engine(target).generate(requests), plain)
    texts = [[*r.prompt_ids, *r.token_ids] for r in plain]
    helped = HalfRight(tiny_drafter("lookup", target.hooks()), texts, seed=3)
    assert_same(Engine(target, helped, policy=FixedLength(7)).generate(requests), plain)
    assert_same(Engine(target, helped, policy=FixedLength(2)).generate(requests[:1]), plain[:1])


def test_the_length_policy_does_not_reach_the_text(reference: Any) -> None:
    known: Reference = reference("qwen3")
    helped = HalfRight(tiny_drafter("hyflash", known.target.hooks()), known.texts(), seed=1)
    for costs in ({1: 1.0, 16: 1.1}, {1: 1.0, 2: 3.0, 16: 40.0}):
        engine = known.engine(helped, policy=AdaptiveLength(costs, max_draft_tokens=15))
        assert_same(engine.generate(known.requests), known.plain)


def test_prefill_in_any_chunks_gives_the_same_rounds(reference: Any) -> None:
    known: Reference = reference("mistral")
    drafter = tiny_drafter("lookup+hyflash", known.target.hooks())
    prompt = tuple(torch.randint(3, 9, (150,), generator=torch.Generator().manual_seed(2)).tolist())
    request = Request(prompt_ids=prompt, params=SamplingParams(max_tokens=20, ignore_eos=True))
    results = [
        known.engine(drafter, policy=FixedLength(5), prefill_chunk=chunk).generate([request])[0]
        for chunk in (1, 64, 100, 512)
    ]
    assert len({r.token_ids for r in results}) == 1
    assert len({r.rounds for r in results}) == 1
    assert sum(trace.num_drafted for trace in results[0].rounds) > 0


def test_streamed_events_add_up_to_the_result(reference: Any) -> None:
    known: Reference = reference("phi3")
    helped = HalfRight(tiny_drafter("lookup", known.target.hooks()), known.texts(), seed=3)
    for request, plain in zip(known.requests, known.plain, strict=True):
        events = list(known.engine(helped, policy=FixedLength(7)).stream(request))
        assert sum((e.token_ids for e in events), ()) == plain.token_ids
        assert "".join(e.text for e in events) == plain.text
        assert [p.token_id for e in events for p in e.logprobs] == [p.token_id for p in plain.logprobs]
        assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == plain.finish_reason


@pytest.mark.parametrize("model", ["llama", pytest.param("native-llama", marks=needs_kernels)])
def test_a_draft_that_breaks_the_target_changes_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 9 has an embedding of NaN: drafted, it must not spoil the rows before it, nor the rounds after."""
    path = family_dir(tmp_path, "llama", tie_word_embeddings=False, head_dim=16)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = float("nan")
    weights["lm_head.weight"][9] = -1.0  # hardly ever said
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    target = load(path, model)
    prompts = [tuple(t for t in text(n, seed=n).tolist() if t != 9) for n in (8, 20)]
    params = SamplingParams(max_tokens=20, ignore_eos=True, logit_bias={9: -100.0})
    requests = [Request(prompt_ids=p, params=params) for p in prompts]
    want = [Engine(target).generate([r])[0].token_ids for r in requests]
    for right in (False, True):
        drafter = tiny_drafter("dflash", target.hooks())
        own = drafter.propose

        def broken(state: State, request: DraftRequest, own: Any = own, right: bool = right) -> Proposal:
            proposal = own(state, request)
            return proposal._replace(drafts=[d._replace(tokens=[9] * len(d.tokens)) for d in proposal.drafts])

        monkeypatch.setattr(drafter, "propose", broken)
        used = HalfRight(drafter, [[*p, *w] for p, w in zip(prompts, want, strict=True)]) if right else drafter
        engine = Engine(target, used, policy=FixedLength(3))
        assert [r.token_ids for r in engine.generate(requests)] == want
        # The kernels keep a broken row apart, so that nothing has to be computed again.
        assert (engine.counters["rechecks"] > 0) == (model == "llama")


def test_a_draft_vocabulary_larger_than_the_targets_does_no_harm(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: Reference = reference("llama")
    drafter = tiny_drafter("lookup", known.target.hooks())
    own = drafter.propose

    def shifted(state: State, request: DraftRequest) -> Proposal:
        proposal = own(state, request)
        large = [[VOCAB + 5 if t % 3 == 0 else t for t in draft.tokens] for draft in proposal.drafts]
        return proposal._replace(
            drafts=[d._replace(tokens=tokens) for d, tokens in zip(proposal.drafts, large, strict=True)]
        )

    monkeypatch.setattr(drafter, "propose", shifted)
    assert_same(known.engine(drafter, policy=FixedLength(7)).generate(known.requests), known.plain)
