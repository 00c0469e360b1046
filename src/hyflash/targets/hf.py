"""Any Hugging Face causal LM as a target: ragged packed rows, features by hooks, caches that truncate.

In: a directory or hub name that transformers can load (Llama, Qwen2/3, Gemma, Phi, Mistral and the like).
Out: an `HFTarget`. All rows of all sequences travel as one packed sequence, so linear layers see no padding;
attention is ours (`targets/attention.py`). On CPUs with MKL its strict reproducibility mode makes a row's bits
independent of the rows beside it; whether that holds here is measured at load, and recorded in `exactness`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyflash.cache import SlotCache
from hyflash.core import Rows, TargetHooks, TargetInfo, TargetOutput
from hyflash.errors import HyflashError, UserError, reason
from hyflash.ops.rope import rotate, turn_tables
from hyflash.targets.attention import NAME, attend, make_plan
from hyflash.targets.base import Exactness, Target
from hyflash.targets.fingerprint import fingerprint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FEATURE_LIMIT = 65504.0
"""Largest fp16 value; features beyond it (massive activations) would overflow half-precision paths."""


def load(path: str, *, dtype: str = "float32", num_threads: int | None = None) -> HFTarget:
    """Load a causal LM for verification. Raises UserError for a path, family or dtype that cannot serve."""
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    # Strict mode must be asked for before MKL's first call; a user's own choice is kept.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(NAME, attend)
    if not Path(path).exists() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise UserError(f"target {path!r} is neither a directory nor a hub name of the form owner/name.")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[dtype], attn_implementation=NAME, trust_remote_code=False, output_loading_info=True
        )
    except MemoryError:
        raise
    except Exception as err:  # transformers and safetensors raise errors of every kind for files they cannot use
        first = reason(err)
        if "ignore_mismatched_sizes" in first:
            first = "its weights have other shapes than its config.json asks for."
        if NAME in first:
            first = (
                "this family's attention cannot be replaced; expected one such as Llama, Qwen, Gemma, Phi or Mistral."
            )
        raise UserError(f"cannot load target {path!r}: {first}") from err
    if missing := sorted(loading["missing_keys"]):  # transformers would make numbers up
        raise UserError(
            f"cannot load target {path!r}: its files lack {len(missing)} weights of its config, {missing[0]} among "
            "them; copy the whole model again."
        )
    try:
        return HFTarget(model, name=Path(path).name, fingerprint=fingerprint(path))
    except (HyflashError, MemoryError):
        raise
    except Exception as err:  # a config that loads and cannot run: no layers, no heads, no context ...
        raise UserError(f"cannot run target {path!r}: {reason(err)} (is its config.json whole?).") from err


class HFTarget(Target):
    """A transformers causal LM behind the target contract (`targets/base.py`)."""

    def __init__(self, model: nn.Module, *, name: str, fingerprint: str) -> None:
        self.model = model.eval().requires_grad_(False)
        config = model.config.get_text_config()  # type: ignore[operator,union-attr]
        _refuse_unsupported(model, config, name)
        self._base: nn.Module = model.base_model  # type: ignore[assignment]
        self._layers: nn.ModuleList = self._base.layers  # type: ignore[assignment]
        self._lm_head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self._embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        self._logit_scale = float(scale or 1.0) / float(divisor or 1.0)  # Cohere's name, and Granite's
        self.info = _info(model, config, name, fingerprint)
        self.cache = SlotCache(self.info.num_layers)
        self._wanted: dict[int, Tensor] = {}
        self._tainted: set[int] = set()  # sequences with values that are not finite in their cache
        for index, layer in enumerate(self._layers):
            layer.register_forward_hook(self._make_tap(index))
        self.exactness: Exactness = "invariant"
        self.epsilon = 0.0
        self._embed_scale = self._measure_embed_scale()
        self._check_head()
        self._calibrate()

    # ------------------------------------------------------------------------------------ contract

    def open(self) -> int:
        """Start an empty sequence."""
        return self.cache.open()

    def close(self, seq: int) -> None:
        """Forget a sequence."""
        self.cache.close(seq)
        self._tainted.discard(seq)

    def length(self, seq: int) -> int:
        """Tokens in the sequence's cache."""
        return self.cache.lengths[seq]

    def truncate(self, seq: int, length: int) -> None:
        """Drop cached tokens at positions >= length."""
        self.cache.truncate(seq, length)
        if seq in self._tainted:  # a mask hides stale numbers, but not NaN
            self.cache.wipe(seq, length)

    def kv_bytes(self) -> int:
        """Bytes of KV the open sequences hold."""
        return self.cache.nbytes()

    def kv_view(self, seq: int, layer: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """The cache itself in float32, copies of half types; see `Target.kv_view`."""
        first, last = self._kv_span(seq, layer, first, last)
        if last == 0:  # the cache may not have got a place for the sequence yet
            none = torch.zeros(0, self.info.num_kv_heads, self.info.head_dim, device=self.info.device)
            return none, none
        keys, values = self.cache.view(layer, seq, seq + 1, last)
        return keys[0, :, first:].transpose(0, 1).float(), values[0, :, first:].transpose(0, 1).float()

    def describe(self) -> dict[str, Any]:
        """Backend, arithmetic, threads."""
        return {"backend": "torch", "dtype": self.info.dtype, "num_threads": torch.get_num_threads()}

    def memory(self) -> dict[str, int]:
        """Bytes of weights and of KV."""
        weights = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
        return {"weights_bytes": weights, "kv_bytes": self.kv_bytes()}

    @torch.no_grad()
    def forward(self, rows: Rows) -> TargetOutput:
        """One forward of packed rows; see `Target.forward`."""
        self._check(rows)
        ends = [self.cache.lengths[s] + n for s, n in zip(rows.seqs, rows.lengths, strict=True)]
        self.cache.reserve(max(ends))
        plan = make_plan(self.cache, rows.seqs, rows.lengths, invariant=self.exactness == "invariant")
        self._wanted = dict.fromkeys(rows.taps, torch.empty(0))
        out = self._base(
            input_ids=rows.tokens[None].to(self.info.device),
            position_ids=plan.positions[None],
            use_cache=False,
            hyflash_plan=plan,
        )
        final = out.last_hidden_state[0]  # (N, D), after the final norm
        if not bool(torch.isfinite(final).all()):
            self._tainted.update(rows.seqs)
        if self.info.num_layers in self._wanted:
            self._wanted[self.info.num_layers] = final
        features = None
        if rows.taps:
            stacked = torch.stack([self._wanted[tap] for tap in rows.taps], dim=1)  # (N, C, D)
            features = stacked.nan_to_num(0.0).clamp(-FEATURE_LIMIT, FEATURE_LIMIT)
        self._wanted = {}
        for seq, end in zip(rows.seqs, ends, strict=True):
            self.cache.lengths[seq] = end
        if rows.logits == "none":
            return TargetOutput(logits=None, features=features)
        if rows.logits == "last":
            final = final[torch.tensor(rows.lengths).cumsum(0) - 1]
        return TargetOutput(logits=self._head(final).float(), features=features)

    def hooks(self) -> TargetHooks:
        """Embedding and head for drafters."""
        weight: Tensor = self._lm_head.weight  # type: ignore[assignment]
        return TargetHooks(
            info=self.info,
            embed=self._embed,
            head=self._head,
            head_rows=lambda ids: weight[ids],
            rotation=self._rotation,
        )

    # --------------------------------------------------------------------------------------- parts

    def _make_tap(self, index: int) -> Any:
        def tap(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if index in self._wanted:
                hidden = output[0] if isinstance(output, tuple) else output
                self._wanted[index] = hidden[0]

        return tap

    def _embed(self, ids: Tensor) -> Tensor:
        out: Tensor = self._embedding(ids)
        return out * self._embed_scale if self._embed_scale != 1.0 else out

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._lm_head(hidden)
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @torch.no_grad()
    def _rotation(self, layer: int) -> tuple[Sequence[float], float]:
        """How a layer rotates keys, checked on them: of one token over and over, all differ by their rotation alone.

        Raises UserError where it is another way.
        """
        rotary, config = getattr(self._base, "rotary_emb", None), self.model.config.get_text_config()  # type: ignore[operator,union-attr]
        kinds = getattr(config, "layer_types", None)
        kind = "" if hasattr(rotary, "inv_freq") or not kinds else f"{kinds[layer]}_"
        frequencies = getattr(rotary, f"{kind}inv_freq", torch.zeros(0)).double()
        factor = float(getattr(rotary, f"{kind}attention_scaling", 1.0))
        seq, n = self.open(), min(3, self.info.max_context)
        try:
            self.forward(
                Rows(
                    tokens=torch.full((n,), min(3, self.info.vocab_size - 1)), seqs=(seq,), lengths=(n,), logits="none"
                )
            )
            keys = self.kv_view(seq, layer)[0].clone()
        finally:
            self.close(seq)
        turned = rotate(keys[:1].expand_as(keys), *turn_tables(torch.arange(n), frequencies))  # key 0 has the factor
        if not len(frequencies) or not (turned - keys).norm() <= 2e-2 * keys.norm():
            raise UserError(
                f"{self.info.name}: the family {self.info.family} rotates its keys in a way unknown here; "
                "expected a drafter that does not read them."
            )
        return frequencies.tolist(), factor

    def _check(self, rows: Rows) -> None:
        num = sum(rows.lengths)
        if rows.tokens.shape != (num,) or min(rows.lengths, default=0) < 1 or len(set(rows.seqs)) != len(rows.seqs):
            raise HyflashError(f"malformed rows: {tuple(rows.tokens.shape)} tokens, lengths {rows.lengths}.")
        for tap in rows.taps:
            if not 0 <= tap <= self.info.num_layers:
                raise UserError(f"tap {tap} is not a layer of {self.info.name}; expected 0 to {self.info.num_layers}.")
        for seq, n in zip(rows.seqs, rows.lengths, strict=True):
            if not self.cache.is_open(seq):
                raise HyflashError(f"sequence {seq} is not open.")
            if self.cache.lengths[seq] + n > self.info.max_context:
                raise UserError(
                    f"{self.cache.lengths[seq] + n} tokens do not fit the context of {self.info.name}, "
                    f"{self.info.max_context} tokens; shorten the prompt."
                )

    @torch.no_grad()
    def _measure_embed_scale(self) -> float:
        """Factor between the embedding table and what the first layer sees (Gemma scales by sqrt(D))."""
        seen: list[Tensor] = []
        handle = self._layers[0].register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
        ids = torch.arange(min(4, self.info.vocab_size))
        seq = self.open()
        try:
            self.forward(Rows(tokens=ids, seqs=(seq,), lengths=(len(ids),), logits="none"))
        finally:
            handle.remove()
            self.close(seq)
        if unused := self.cache.unused_layers():
            raise UserError(
                f"{self.info.name}: layers {unused} of this {self.info.family} model keep no keys and values that "
                "hyflash can see; expected an attention-only decoder such as Llama, Qwen, Gemma, Phi or Mistral."
            )
        table: Tensor = self._embedding(ids)
        scale = float((seen[0][0].double() * table.double()).sum() / table.double().square().sum())
        scale = 1.0 if abs(scale - 1.0) < 1e-6 else scale
        if not torch.allclose(seen[0][0], table * scale, rtol=1e-2, atol=1e-4):
            raise UserError(f"{self.info.name}: its embedding is not a scaled table; hyflash cannot share it.")
        return scale

    @torch.no_grad()
    def _check_head(self) -> None:
        """Our head must be the model's own: compare once against the model's logits."""
        ids = torch.arange(min(4, self.info.vocab_size))
        seq = self.open()
        ours = self.forward(Rows(tokens=ids, seqs=(seq,), lengths=(len(ids),))).logits
        self.truncate(seq, 0)
        plan = make_plan(self.cache, (seq,), (len(ids),), invariant=True)
        theirs = self.model(
            input_ids=ids[None], position_ids=plan.positions[None], use_cache=False, hyflash_plan=plan
        ).logits[0]
        self.close(seq)
        assert ours is not None
        if torch.isfinite(theirs).all() and not torch.allclose(ours, theirs.float(), rtol=1e-2, atol=1e-2):
            raise UserError(
                f"{self.info.name}: the family {self.info.family} changes its logits in a way unknown here."
            )

    def _calibrate(self) -> None:
        """Feed one text at several widths; equal bits mean row invariance, else set epsilon for rechecks.

        Raises UserError where logits differ by more than rounding: then layers keep state besides keys and values.
        """
        generator = torch.Generator().manual_seed(0)
        n = min(76, self.info.max_context)
        ids = torch.randint(0, self.info.vocab_size, (n,), generator=generator)
        reference = self._run(ids, [n])
        splits = [[33, n - 33], [n - 24, 16, 5, 3], [n - 4, 1, 1, 2]] if n > 40 else [[1] * n]
        worst = self._largest_difference(ids, splits, reference)
        if worst > float(reference.nan_to_num(0.0).std()):
            raise UserError(
                f"{self.info.name}: its logits change by {worst:.2g} when a text is fed in pieces, so this "
                f"{self.info.family} model keeps more than keys and values; expected an attention-only decoder."
            )
        # Half precision rounds most differences away, so that a short text may happen to show none.
        rounding = torch.finfo(self._lm_head.weight.dtype).eps  # type: ignore[arg-type]
        if worst > 0.0 or rounding > 1e-4:
            self.exactness = "recheck"  # which attends by another kernel
            worst = max(worst, self._largest_difference(ids, splits, self._run(ids, [n])))
            if rounding > 1e-4:
                worst = max(worst, rounding * float(reference.nan_to_num(0.0).abs().max()))
            self.epsilon = 16.0 * worst  # single differences were seen up to 4x the largest of a short text

    def _largest_difference(self, ids: Tensor, splits: list[list[int]], reference: Tensor) -> float:
        """How far logits of a text fed in pieces are from those of the text fed whole."""
        return max(float((self._run(ids, split) - reference).abs().nan_to_num(0.0).max()) for split in splits)

    def _run(self, ids: Tensor, widths: list[int]) -> Tensor:
        """Logits (T, V) of a text fed in pieces of the given widths."""
        seq, pieces, first = self.open(), [], 0
        for n in widths:
            out = self.forward(Rows(tokens=ids[first : first + n], seqs=(seq,), lengths=(n,)))
            assert out.logits is not None
            pieces.append(out.logits)
            first += n
        self.close(seq)
        return torch.cat(pieces)


def _refuse_unsupported(model: nn.Module, config: Any, name: str) -> None:
    """Recurrent layers cannot be truncated; encoder-decoders are no causal LMs."""
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise UserError(
            f"{name}: a {config.model_type} model has no list of decoder layers that hyflash can tap; "
            "expected a decoder such as Llama, Qwen, Gemma, Phi or Mistral."
        )
    facts = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "max_position_embeddings")
    missing = [fact for fact in facts if not (isinstance(n := getattr(config, fact, None), int) and n > 0)]
    if missing:
        raise UserError(f"{name}: the config of this {config.model_type} model has no {', '.join(missing)} above 0.")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    bad = kinds - {"full_attention", "sliding_attention", "attention"}
    if bad:
        raise UserError(f"{name}: layers of kind {', '.join(sorted(bad))} cannot roll back; expected attention only.")
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder; expected a causal language model.")


def _info(model: nn.Module, config: Any, name: str, identity: str) -> TargetInfo:
    heads = int(config.num_attention_heads)
    eos: list[int] = []
    for owner in (model.generation_config, config):
        value = getattr(owner, "eos_token_id", None)
        eos += [] if value is None else [value] if isinstance(value, int) else list(value)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope) if isinstance(rope, dict) else {}
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    return TargetInfo(
        name=name,
        fingerprint=identity,
        family=str(config.model_type),
        vocab_size=int(weight.shape[0]),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        max_context=_max_context(config),
        eos_token_ids=tuple(sorted({token for token in eos if 0 <= token < weight.shape[0]})),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
    )


def _max_context(config: Any) -> int:
    """Longest context that is served. With longrope it ends where the model changes to other rotary frequencies.

    That change turns every row of a forward as soon as one has passed the border, and the keys in the cache stay.
    """
    limit = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for table in (rope, *rope.values()):
        if isinstance(table, dict) and table.get("rope_type") == "longrope":
            limit = min(limit, int(table.get("original_max_position_embeddings") or limit))
    return limit
