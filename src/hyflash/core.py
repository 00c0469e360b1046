"""The dataclasses that cross borders between parts. No behaviour beyond validation, no torch at import.

Dimension letters (used in every shape comment of the project):
B batch rows, T committed tokens in this call, L draft positions, A anchors per sequence, C tapped layers,
D model width, H/G query/KV heads, K head dim, S recurrent state width, V vocabulary, N packed rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from hyflash.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "error"]


# ------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request chooses its tokens and when it ends. Raises UserError on values that make no sense."""

    max_tokens: int = 256
    min_tokens: int = 0
    """Stop tokens are masked and stop strings not looked for before this many tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Report the log-probability of each token and of this many top alternatives."""
    seed: int = 0
    draft_sampling: bool = False
    """Let the drafter sample its drafts: more are accepted at a high temperature. The text then has the target's
    distribution, as ever, but is not the one that plain sampling gives with this seed: it depends on the drafter."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise UserError(f"{name} is {getattr(self, name)!r}; expected {want}.")

        def real(x: float) -> bool:  # isfinite() would raise at a whole number beyond float64
            return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max

        def whole(x: object) -> bool:
            return isinstance(x, int) and not isinstance(x, bool)

        check(whole(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "a whole number of at least 1")
        check(whole(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens, "min_tokens", "0 to max_tokens")
        check(real(self.temperature) and self.temperature >= 0, "temperature", "a finite number of at least 0")
        check(whole(self.top_k) and self.top_k >= 0, "top_k", "a whole number of at least 0 (0 is off)")
        check(real(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1")
        check(real(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number from 0 to 1")
        check(real(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", "a number above 0")
        check(real(self.presence_penalty), "presence_penalty", "a finite number")
        check(real(self.frequency_penalty), "frequency_penalty", "a finite number")
        check(self.logprobs is None or (whole(self.logprobs) and 0 <= self.logprobs <= 20), "logprobs", "0 to 20")
        check(whole(self.seed) and 0 <= self.seed < 2**64, "seed", "a whole number from 0 to 2**64-1")
        if self.draft_sampling and not self.temperature > 0:
            raise UserError("draft_sampling needs a temperature above 0: greedy text has nothing to sample.")
        # A lone string would pass as the sequence of its characters.
        check(not isinstance(self.stop, str), "stop", "a tuple of strings")
        check(all(isinstance(s, str) and s for s in self.stop), "stop", "strings that are not empty")
        check(all(map(whole, self.stop_token_ids)), "stop_token_ids", "whole numbers")
        check(all(whole(k) and real(v) for k, v in self.logit_bias.items()), "logit_bias", "token id -> finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. `prompt_ids` has at least one token."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    num_draft_tokens: int | None = None
    """Cap on draft tokens per round for this request; None leaves it to the length policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of a committed token under the target's processed distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What one round committed for one request, in the order it happened."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrace:
    """One round of one request: what was drafted, accepted, committed, and by which source."""

    num_drafted: int
    num_accepted: int
    num_committed: int
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished request. Token counts exclude the prompt; times are wall-clock seconds."""

    request_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    rounds: tuple[RoundTrace, ...]
    ttft_sec: float
    """From submit to the first committed token."""
    decode_sec: float
    """From the end of prefill to the last committed token."""
    draft_state_bytes: int
    """Drafter memory of this request at its end."""
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target forward, bonus included; 0 without rounds."""
        return len(self.token_ids) / len(self.rounds) if self.rounds else 0.0

    @property
    def tokens_per_sec(self) -> float:
        """Committed tokens per second of decoding (prefill excluded)."""
        return len(self.token_ids) / self.decode_sec if self.decode_sec > 0 else 0.0


# --------------------------------------------------------------------------------------------- target

BACKENDS = ("auto", "native", "torch")
DTYPES = ("float32", "bfloat16", "float16")
QUANTS = ("none", "q8_0", "q4_0", "q4_1")
KV_TYPES = ("float16", "bfloat16", "float32", "int8")
DRAFT_WEIGHTS = ("q4_1", "q4_0", "q8_0", "bfloat16", "float32", "torch")
"""The first is the default."""
LENGTHS = ("adaptive", "nightjar", "fixed")
"""How draft lengths are chosen."""
MAX_THREADS = 1024
"""Far above any use; the thread library ends the whole process when it cannot make as many as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """How a target is loaded; None leaves a choice to its backend. Raises UserError on what does not go together."""

    backend: str = "auto"
    """native (our CPU kernels), torch, or auto: native where it can serve the model."""
    dtype: str | None = None
    """Arithmetic of the torch backend, float32 unless given."""
    quant: str | None = None
    """Weights of the native backend where it loads a model directory; none, unless given, keeps what is stored."""
    kv: str | None = None
    """Keys and values of the native backend, float16 unless given."""
    draft_weights: str | None = None
    """How a drafter beside the native backend keeps its weights, q4_1 unless given; torch leaves it on torch."""
    num_threads: int | None = None

    def __post_init__(self) -> None:
        words = (
            ("backend", BACKENDS),
            ("dtype", DTYPES),
            ("quant", QUANTS),
            ("kv", KV_TYPES),
            ("draft_weights", DRAFT_WEIGHTS),
        )
        for name, known in words:
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UserError(f"{name} is {value!r}; expected {' or '.join(known)}.{nearest(str(value), known)}")
        native = [name for name in ("quant", "kv", "draft_weights") if getattr(self, name) is not None]
        if native and self.backend == "torch":
            raise UserError(f"{native[0]} is an option of the native backend, and the backend is torch.")
        if self.dtype is not None and (self.backend == "native" or native):
            other = native[0] if native else "backend native"
            raise UserError(f"dtype is an option of the torch backend and does not go with {other}; leave one out.")
        if self.num_threads is not None and not 1 <= self.num_threads <= MAX_THREADS:
            raise UserError(f"threads is {self.num_threads}; expected a whole number from 1 to {MAX_THREADS}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """The static facts of a target that drafters, reports and cards need."""

    name: str
    fingerprint: str
    """Hash of the weight files (names, shapes, sampled bytes); settings in config.json are not part of it."""
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens of several sequences for one target forward, packed sequence after sequence.

    Position of a token = length of its sequence's cache + its index among the sequence's new tokens.
    """

    tokens: Tensor  # (N,) int64
    seqs: tuple[int, ...]  # B sequence handles, each at most once
    lengths: tuple[int, ...]  # B new tokens per sequence, each >= 1; they sum to N
    taps: tuple[int, ...] = ()  # decoder layers whose outputs are wanted; num_layers = after the final norm
    logits: Literal["all", "last", "none"] = "all"  # every row, the last row of each sequence, or no row
    top: int = 0  # above 0: only this many best logits of these rows are wanted, where the target can tell them


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """Result of one target forward, rows in the order of `Rows.tokens`."""

    logits: Tensor | None  # (N or B, V) float32, by Rows.logits; None where the best ones below take its place
    features: Tensor | None  # (N, C, D) in the order of Rows.taps, clamped to +-65504; not written to again
    top_ids: Sequence[Sequence[int]] | None = None  # (N or B, Rows.top), NaN first, then the best, of equals the lowest
    top_values: Sequence[Sequence[float]] | None = None  # (N or B, Rows.top)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """Where a native target's embedding rows lie in memory, as long as the target lives."""

    kind: str
    """GGUF's name of their type."""
    address: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHooks:
    """What a drafter may use of its target: static facts and the frozen embedding and head."""

    info: TargetInfo
    embed: Callable[[Tensor], Tensor]
    """Token ids (...,) -> input embeddings (..., D) as the target's first layer sees them."""
    head: Callable[[Tensor], Tensor]
    """Final-normed hidden states (..., D) -> logits (..., V), soft-cap and scale included."""
    head_rows: Callable[[Tensor], Tensor]
    """Token ids (n,) -> rows (n, D) of the head's weight, for reduced vocabularies and chunked losses."""
    table: EmbeddingTable | None = None
    """What `embed` reads, where the CPU kernels can read it too."""
    rotation: Callable[[int], tuple[Sequence[float], float]] | None = None
    """Decoder layer -> radians per position of each pair (i, i + P) of a head's first 2P numbers, and the factor on
    both halves; None: the whole head by `info.rope_theta`."""


# -------------------------------------------------------------------------------------------- drafter


class TargetKV(Protocol):
    """The target's own keys and values of all committed tokens: a view to read before the next forward, no copy."""

    def read(self, row: int, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values (T, G, K) float32 of the tokens first..last-1 of a state row at a decoder layer."""

    def attend(self, row: int, layer: int, first: int, last: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """What scaled, rotated queries (Q, H, K) see in those tokens: outputs (Q, H, K), log-sum-exps (Q, H)."""


class Draft(NamedTuple):
    """Draft tokens of one row, possibly none; a plain tuple, since every round makes one for each source."""

    tokens: Sequence[int] = ()
    confidence: Sequence[float] = ()
    """Estimate of P(accepted | all before accepted) for each token; empty where none is stated."""
    source: str = ""
    """Name of the drafter it is from; filled by those that choose between sources."""
    kind: int = 0
    """Acceptance is kept apart by it (lookup: match length)."""
    notes: object = None
    """For the drafter itself: comes back with the verdict."""


class Verdict(NamedTuple):
    """How the last proposal of each row fared; lets a drafter learn without `propose` writing state."""

    drafts: Sequence[Draft]
    """B, with the tokens that were judged, none where the row had no draft. A round that ends without a token of the
    target's own (a stop, a recheck) judges no more than it accepts."""
    num_accepted: Sequence[int]
    """B"""
    followers: Sequence[int | None] = ()
    """B, the target's own token after the accepted ones, the next anchor; None where the text ended without."""
    replies: Sequence[Sequence[tuple[int, int]]] = ()
    """B, of each row's verified drafts, rejected ones included, the pairs (draft token, most likely token after it).
    Only where the drafter or a part of it recycles them (`Drafter.recycles`); in a composition also of other parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Tokens that became part of the text and whose features exist: the old anchor and the accepted drafts.

    The bonus token is not among them; it is the next anchor. The first commit of a row is its prompt
    without the last token (prefill), in pieces of any size.
    """

    rows: Sequence[int]  # B state rows, each at most once
    tokens: Sequence[Sequence[int]]  # B, 0..T tokens each
    features: Tensor | None  # (B, T, C, D) at the drafter's target_layer_ids, zeros where padded; None without taps
    verdict: Verdict | None = None
    kv: TargetKV | None = None  # for drafters with target_kv_layers; holds these tokens, and maybe more

    @property
    def lengths(self) -> list[int]:
        """Tokens per row."""
        return [len(tokens) for tokens in self.tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a round costs on this machine, for drafters that choose by it."""

    forward: Sequence[float]
    """By draft tokens per row, from 0 to as many as may be asked for: cost of the forward that verifies them, in
    forwards of one token."""
    one_sec: float
    """Seconds of a forward of one token."""


class Draw(NamedTuple):
    """How a row's drafts are to be sampled: by the request's temperature, filters and seed."""

    params: SamplingParams
    position: int
    """Absolute position of the first draft token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """Ask for up to `num_tokens[b]` tokens that follow `anchors[b]` in state row `rows[b]`."""

    rows: Sequence[int]  # B
    anchors: Sequence[int]  # B token ids
    num_tokens: Sequence[int]  # B, each >= 1
    prices: Prices | None = None  # None: propose what is most accepted, whatever it costs
    draws: Sequence[Draw | None] | None = None  # B, rows that want samples; None: no row does
    kv: TargetKV | None = None  # for drafters with target_kv_layers; holds the tokens before each anchor


class Proposal(NamedTuple):
    """Drafts of each row, no longer than asked."""

    drafts: Sequence[Draft]
    """B"""
    probs: Tensor | None = None
    """(B, L, V) float64, the distribution each draft is a sample of, given those before it; None = all are certain. No
    token may then be cut or kept by what it turned out to be, or its distribution is another one than stated."""
    num_nonfinite: int = 0
    """Rows cut short because the drafter produced NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Target-generated sequences with features and sampled anchors. Padded right; padding is masked everywhere."""

    tokens: Tensor  # (B, T) int64
    features: Tensor  # (B, T, C, D) at the drafter's target_layer_ids
    lengths: Tensor  # (B,) int64, valid tokens per sequence
    loss_mask: Tensor  # (B, T) bool, token may be a label (an answer token of the target)
    anchors: Tensor  # (B, A) int64 positions, context is strictly before them
    anchor_mask: Tensor  # (B, A) bool, anchor is real
    weights: Tensor  # (B, A) float32, loss weight of the anchor (loops count less)
    ids: tuple[str, ...] = ()  # sequence ids, for error messages
    progress: float = 1.0  # share of the training's budget that is used, for losses that change; 1 outside training
    target_kv: Tensor | None = None  # (B, T, R, 2, G, K) rotated keys, values at the drafter's R target_kv_layers
    starts: Tensor | None = None  # (B,) int64, position in its text of each sequence's first token; None: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    """Training forward of a block drafter: one prediction per anchor and draft position."""

    hidden: Tensor  # (B, A, L, D) input of the head
    labels: Tensor  # (B, A, L) int64, token at anchor + 1 + l
    mask: Tensor  # (B, A, L) bool, label exists and is supervised
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Loss as sums, so that accumulation and ranks weigh alike: total = sum(numerator) / sum(denominator)."""

    numerator: Tensor  # () float32, with gradient
    denominator: Tensor  # () float32, without gradient
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # name -> (numerator, denominator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What proposals stated and how they fared, round after round; for drafters that calibrate their confidence."""

    confidence: Tensor  # (N, L) float32 as proposed, 0 behind the drafts
    num_drafted: Tensor  # (N,) int64
    num_accepted: Tensor  # (N,) int64


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """Static cost of a drafter for one sequence with a given context."""

    state_bytes: int
    """Memory that does not grow with the context."""
    kv_bytes_per_token: int
    """Memory per committed token that grows."""
    weight_bytes: int
    propose_flops: int
    commit_flops_per_token: int

    def total_bytes(self, context_tokens: int) -> int:
        """Drafter state of one sequence at this context, without weights."""
        return self.state_bytes + self.kv_bytes_per_token * context_tokens
