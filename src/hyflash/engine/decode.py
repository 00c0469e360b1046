"""The engine: rounds of propose, verify, commit over ragged batches; plain decoding is the same loop without drafts.

In: requests. Out: events per round, and results. The engine knows no drafter and no model family by name.
A request's last prompt token is its first anchor: prefill feeds the tokens before it, and every generated token,
the first included, comes from a round.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from hyflash.core import (
    Commit,
    Draft,
    DraftRequest,
    Draw,
    Event,
    Prices,
    Proposal,
    Request,
    Result,
    RoundTrace,
    Rows,
    SamplingParams,
    TargetOutput,
    Verdict,
)
from hyflash.drafters.base import Drafter, State, check_samples
from hyflash.drafters.late import LateCommits
from hyflash.engine.length import FixedLength, LengthPolicy, RowStats
from hyflash.engine.offload import Offload, read_again
from hyflash.engine.progress import Progress, check_params, check_request
from hyflash.engine.target_kv import RowKV
from hyflash.engine.verify import choices, judged_part, num_best, replies, verify, weigh
from hyflash.errors import HyflashError, UserError
from hyflash.targets.base import Exactness, Target
from hyflash.text import Tokenizer

Exact = Literal["auto", "recheck", "off"]
NO_DRAFT = Draft()


class Engine:
    """Continuous batching of plain and speculative decoding over one target and at most one drafter.

    `exact="auto"` keeps the promise by the target's own means: nothing to do where rows are invariant, rechecks of
    near ties where they are not; "recheck" forces the latter, "off" gives it up and only counts near ties.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        policy: LengthPolicy | None = None,
        exact: Exact = "auto",
        max_rows: int = 64,
        prefill_chunk: int = 512,
        offload: Offload | None = None,
    ) -> None:
        if exact not in ("auto", "recheck", "off"):
            raise UserError(f"exact is {exact!r}; expected auto, recheck or off.")
        if max_rows < 1 or prefill_chunk < 1:
            raise UserError(f"max_rows is {max_rows} and prefill_chunk {prefill_chunk}; expected at least 1.")
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        default_length = drafter.max_draft_tokens if drafter is not None else 0
        self.policy = policy if policy is not None else FixedLength(default_length)
        self.exactness: Exactness = target.exactness if exact == "auto" else exact
        self.counters: Counter[str] = Counter()
        self._epsilon = target.epsilon if self.exactness != "invariant" else 0.0
        self._prefill_chunk = prefill_chunk
        self._drafter_name = type(drafter).__module__.rpartition(".")[2]
        self._taps = drafter.target_layer_ids if drafter is not None else ()
        self._recycles = drafter is not None and drafter.recycles
        self._state: State | None = drafter.new_state(max_rows) if drafter is not None else None
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._waiting: deque[Progress] = deque()
        self._active: list[Progress] = []
        self._stats: dict[int, RowStats] = {}
        self._results: dict[int, Result] = {}
        self._next_id = 0
        self._late = LateCommits()
        self._kv = RowKV(target) if drafter is not None and drafter.target_kv_layers else None
        self._max_rows, self._offload = max_rows, offload

    # ------------------------------------------------------------------------------------ requests

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._waiting) + len(self._active)

    def submit(self, request: Request) -> int:
        """Queue a request and return its id. Raises UserError for one that cannot be served."""
        info = self.target.info
        check_request(request, info)
        self.check(request.params)
        progress = Progress(
            self._next_id,
            request,
            tokenizer=self.tokenizer,
            eos_token_ids=info.eos_token_ids,
            max_context=info.max_context,
        )
        self._next_id += 1
        self._waiting.append(progress)
        return progress.request_id

    def check(self, params: SamplingParams) -> None:
        """Raises UserError for settings that this engine cannot honour."""
        check_params(params, self.target.info)
        if params.draft_sampling:
            check_samples(self.drafter, self._drafter_name)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step, also during prefill; what it has committed stays in its result."""
        for progress in (*self._waiting, *self._active):
            if progress.request_id == request_id:
                progress.finish("cancelled")

    def result(self, request_id: int) -> Result:
        """The result of a finished request, once. Raises KeyError before it has finished."""
        return self._results.pop(request_id)

    def generate(self, requests: Sequence[Request]) -> list[Result]:
        """Run requests to their end and return results in the same order."""
        ids: list[int] = []
        try:
            for request in requests:  # one that is refused takes the others with it
                ids.append(self.submit(request))
            while any(i not in self._results for i in ids):
                self.step()
        except BaseException:
            for i in ids:
                self.cancel(i)
            self._retire()
            raise
        return [self.result(i) for i in ids]

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one request, yielding its events; closing the iterator cancels it. `result` then has the rest."""
        request_id = self.submit(request)
        try:
            while request_id not in self._results:
                yield from (e for e in self.step() if e.request_id == request_id)
        finally:
            if request_id not in self._results:
                self.cancel(request_id)
                self._retire()

    # --------------------------------------------------------------------------------------- steps

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Admit, prefill one chunk of each new request, run one round of the others, retire the finished."""
        events = self._retire()
        self._admit()
        prefilling = [p for p in self._active if p.num_prefilled < len(p.request.prompt_ids) - 1]
        if prefilling and self.exactness == "recheck":  # a recheck asks for a prompt that was read without company
            for p in prefilling:
                self._prefill([p])
        elif prefilling:
            self._prefill(prefilling)
        running = [p for p in self._active if p.num_prefilled == len(p.request.prompt_ids) - 1]
        if running:
            events += self._round(running)
        return events + self._retire()

    def _admit(self) -> None:
        while self._waiting and self._free_rows:
            progress = self._waiting.popleft()
            progress.row = self._free_rows.pop()
            progress.seq = self.target.open()
            if self._kv is not None:
                self._kv.seqs[progress.row] = progress.seq
            if self._state is not None:
                self._state.reset(progress.row)
            self._stats[progress.request_id] = self.policy.new_stats()
            progress.decode_start_sec = time.perf_counter()
            self._active.append(progress)

    def _retire(self) -> list[Event]:
        """Free what finished requests hold; cancelled ones get their closing event here."""
        events = []
        for queue in (self._waiting, self._active):
            for progress in [p for p in queue if p.finish_reason is not None]:
                queue.remove(progress)
                if progress.finish_reason == "cancelled":
                    events.append(progress.event((), 0, 0))
                if progress.seq >= 0:
                    if self._state is not None:
                        if progress.finish_reason != "cancelled":  # which may follow a fault of the drafter
                            self._catch_up([progress])
                        self._late.put_back(progress.row, [])
                        progress.draft_state_bytes = self._state.nbytes(progress.row)
                        self._state.reset(progress.row)
                    self.target.close(progress.seq)
                    self._free_rows.append(progress.row)
                self._stats.pop(progress.request_id, None)
                self._results[progress.request_id] = progress.result()
        return events

    def _prefill(self, prefilling: list[Progress]) -> None:
        """Feed one chunk of each prompt, the last token excepted, to target and drafter."""
        chunks = []
        for p in prefilling:
            end = min(p.num_prefilled + self._prefill_chunk, len(p.request.prompt_ids) - 1)
            chunks.append(p.request.prompt_ids[p.num_prefilled : end])
        rows = Rows(
            tokens=torch.tensor([t for chunk in chunks for t in chunk]),
            seqs=tuple(p.seq for p in prefilling),
            lengths=tuple(len(chunk) for chunk in chunks),
            taps=self._taps,
            logits="none",
        )
        features = self.target.forward(rows).features
        self._commit(prefilling, chunks, features, rows.lengths, verdict=None)
        for p, chunk in zip(prefilling, chunks, strict=True):
            p.num_prefilled += len(chunk)
            p.num_alone += len(chunk)
            p.decode_start_sec = time.perf_counter()

    def _round(self, running: list[Progress]) -> list[Event]:
        """Propose, verify and commit once for every running request."""
        began = time.perf_counter()
        asked, drafts, probs = self._propose(running)
        drafted = time.perf_counter()
        blocks = [[p.anchor, *draft.tokens] for p, draft in zip(running, drafts, strict=True)]
        rows = Rows(
            tokens=torch.tensor([t for block in blocks for t in block]),
            seqs=tuple(p.seq for p in running),
            lengths=tuple(len(block) for block in blocks),
            taps=self._taps,
            top=num_best(self._epsilon) if all(p.is_plain_greedy for p in running) else 0,
        )
        out = self.target.forward(rows)
        verified = time.perf_counter()
        events, kept, judged, accepted, first = [], [], [], [], 0
        followers: list[int | None] = []
        for p, draft, spread, block in zip(running, drafts, probs, blocks, strict=True):
            before, num_drafted = len(p.token_ids), len(draft.tokens)
            num_accepted, num_committed = self._verify(p, out, first, draft.tokens, spread, width=len(rows.tokens))
            first += len(block)
            kept.append(block[:num_committed])
            accepted.append(num_accepted)
            judged.append(judged_part(draft, num_accepted=num_accepted, num_committed=num_committed))
            followers.append(p.token_ids[-1] if num_committed > num_accepted else None)
            counts = {"num_drafted": num_drafted, "num_accepted": num_accepted, "num_committed": num_committed}
            p.rounds.append(RoundTrace(**counts, source=draft.source if num_drafted else ""))
            self._stats[p.request_id].observe(len(judged[-1].tokens), num_accepted)
            p.last_token_sec = time.perf_counter()
            p.first_token_sec = p.first_token_sec or p.last_token_sec
            self.target.truncate(p.seq, p.position - 1)
            events.append(p.event(tuple(p.token_ids[before:]), num_drafted, num_accepted))
        ready = time.perf_counter()
        if asked:
            verdict = Verdict(judged, accepted, followers, replies(out, drafts) if self._recycles else ())
            self._commit(running, kept, out.features, rows.lengths, verdict=verdict)
        else:
            self._commit_later(running, kept, out.features, rows.lengths)
        commit_sec = time.perf_counter() - ready
        draft_sec = drafted - began + commit_sec
        self.counters["draft_ns"] += round(1e9 * draft_sec)
        self.counters["commit_ns"] += round(1e9 * commit_sec)
        self.counters["verify_ns"] += round(1e9 * (verified - drafted))
        self.policy.observe_times(
            draft_sec=draft_sec if asked else 0.0,
            verify_sec=verified - drafted,
            width=len(rows.tokens),
            num_rows=len(running),
        )
        if self._offload is not None and self._offload.after_round(drafted=asked):
            self._state, self._late = None, LateCommits()
        return events

    # --------------------------------------------------------------------------------------- parts

    def _propose(self, running: list[Progress]) -> tuple[bool, list[Draft], list[Tensor | None]]:
        """Whether the drafter ran; a draft for each request, without tokens where there are none; and where drafts are
        samples, their distributions (L, V)."""
        drafts, probs = [NO_DRAFT] * len(running), list[Tensor | None]([None] * len(running))
        if self.drafter is None:
            return False, drafts, probs
        context_tokens = sum(p.position for p in running) // len(running)
        limit = self.policy.begin_round(num_rows=len(running), context_tokens=context_tokens)
        if self._offload is not None and not self._offload.may_draft():
            limit = 0
        prices = self._prices(len(running))
        wanted = [self._length(p, len(running), limit, is_priced=prices is not None) for p in running]
        chosen = [i for i, k in enumerate(wanted) if k > 0]
        if not chosen or (state := self._whole_state()) is None:
            return False, drafts, probs
        self._catch_up(running)
        draws = [
            Draw(running[i].params, running[i].position) if running[i].params.draft_sampling else None for i in chosen
        ]
        proposal = self.drafter.propose(
            state,
            DraftRequest(
                rows=[running[i].row for i in chosen],
                anchors=[running[i].anchor for i in chosen],
                num_tokens=[wanted[i] for i in chosen],
                prices=prices,
                draws=draws if any(draws) else None,
                kv=self._kv,
            ),
        )
        self._count_nonfinite(proposal)
        vocab = self.target.info.vocab_size
        if proposal.probs is not None and proposal.probs.shape[2] != vocab:
            raise HyflashError(f"drafts are samples of {proposal.probs.shape[2]} tokens; the target has {vocab}.")
        for b, (i, draft) in enumerate(zip(chosen, proposal.drafts, strict=True)):
            if proposal.probs is not None:
                probs[i] = proposal.probs[b]
            # A drafter with a larger vocabulary may propose what the target cannot say.
            good = next((n for n, t in enumerate(draft.tokens[: wanted[i]]) if not 0 <= t < vocab), wanted[i])
            if good < len(draft.tokens):
                draft = draft._replace(tokens=draft.tokens[:good], confidence=draft.confidence[:good])
            drafts[i] = draft if draft.source else draft._replace(source=self._drafter_name)
            stats, num_drafted = self._stats[running[i].request_id], len(draft.tokens)
            self.policy.hears(stats, num_asked=wanted[i], num_drafted=num_drafted)
        return True, drafts, probs

    def _length(self, p: Progress, num_rows: int, limit: int, *, is_priced: bool) -> int:
        """Draft tokens to ask for: the policy's choice within every limit, its own of the round included."""
        assert self.drafter is not None
        most = min(limit, self.drafter.max_draft_tokens, p.remaining - 1)
        if p.request.num_draft_tokens is not None:
            most = min(most, p.request.num_draft_tokens)
        if self.drafter.max_positions is not None:
            most = min(most, self.drafter.max_positions - p.position)
        if most <= 0:
            return 0
        if is_priced and self.drafter.weighs_prices:
            return most if self.policy.asks(self._stats[p.request_id]) else 0
        chosen = self.policy.choose(self._stats[p.request_id], most=most, num_rows=num_rows)
        return most if chosen and is_priced else chosen

    def _prices(self, num_rows: int) -> Prices | None:
        """For drafters that cut what they draft by prices, as far as the policy knows these."""
        assert self.drafter is not None
        if not (self.drafter.weighs_prices or self.drafter.cuts_by_prices):
            return None
        return self.policy.prices(num_rows)

    def _count_nonfinite(self, proposal: Proposal) -> None:
        if proposal.num_nonfinite:
            if not self.counters["draft_nonfinite"]:
                warnings.warn("the drafter gave non-finite logits; those proposals were cut short.", stacklevel=2)
            self.counters["draft_nonfinite"] += proposal.num_nonfinite

    def _verify(
        self, p: Progress, out: TargetOutput, first: int, drafts: Sequence[int], probs: Tensor | None, *, width: int
    ) -> tuple[int, int]:
        """Accepted and committed tokens of one request's block, whose rows begin at `first`."""
        is_alone = width == 1
        if self.exactness == "recheck":
            is_alone = is_alone and p.num_alone == p.position - 1
            p.num_alone += is_alone

        def recheck() -> Tensor:
            """Logits after the anchor at width 1; near ties are decided on keys and values made at width 1 as well."""
            text = (*p.request.prompt_ids, *p.token_ids)
            begin = p.num_alone if self.exactness == "recheck" else len(text) - 1
            self.target.truncate(p.seq, begin)
            for token in text[begin:]:
                alone = self.target.forward(Rows(tokens=torch.tensor([token]), seqs=(p.seq,), lengths=(1,)))
            p.num_alone = len(text)
            assert alone.logits is not None
            return alone.logits[0]

        weighed = weigh(p, drafts, probs)
        outcome = verify(
            p,
            choices(p, out, first, weighed, epsilon=self._epsilon),
            drafts,
            weighed=weighed,
            epsilon=self._epsilon,
            recheck=None if is_alone else recheck,
            recheck_ties=self.exactness == "recheck",
        )
        self.counters["near_ties"] += outcome.num_near_ties
        self.counters["rechecks"] += outcome.num_rechecks
        return outcome.num_accepted, outcome.num_committed

    def _commit(
        self,
        requests: list[Progress],
        kept: Sequence[Sequence[int]],
        features: Tensor | None,
        widths: tuple[int, ...],
        *,
        verdict: Verdict | None,
    ) -> None:
        """Hand committed tokens and their features to the drafter; packed (N, C, D) becomes padded (B, T, C, D)."""
        if self.drafter is None or self._state is None:
            return
        T = max(map(len, kept))
        padded = None
        if features is not None and len(kept) == 1:
            padded = features[None, :T]
        elif features is not None:
            padded, first = features.new_zeros(len(kept), T, *features.shape[1:]), 0
            for b, (tokens, width) in enumerate(zip(kept, widths, strict=True)):
                padded[b, : len(tokens)] = features[first : first + len(tokens)]
                first += width
        commit = Commit(rows=[p.row for p in requests], tokens=kept, features=padded, verdict=verdict, kv=self._kv)
        self.drafter.commit(self._state, commit)

    def _commit_later(
        self, requests: list[Progress], kept: list[list[int]], features: Tensor | None, widths: tuple[int, ...]
    ) -> None:
        """Keep what was committed without drafts until the drafter needs it, or there is much of it."""
        if self._state is None:
            return
        first, full = 0, []
        for p, ids, width in zip(requests, kept, widths, strict=True):
            if self._late.add(p.row, ids, None if features is None else features[first : first + len(ids)]):
                full.append(p)
            first += width
        self._catch_up(full)

    def _catch_up(self, requests: list[Progress]) -> None:
        """Commit what was kept for later."""
        late = self._late.take([p.row for p in requests], self._kv)
        if late is not None and self.drafter is not None and self._state is not None:
            self.drafter.commit(self._state, late)

    def _whole_state(self) -> State | None:
        """The drafter's state; after its weights were away a new one that has read every text, None if they stay so."""
        if self._state is not None or self._offload is None or self.drafter is None or not self._offload.bring_back():
            return self._state
        self._state = self.drafter.new_state(self._max_rows)
        for p in self._active:
            text = (*p.request.prompt_ids, *p.token_ids)[: p.num_prefilled + len(p.token_ids)]
            for tokens, features in read_again(self.target, text, taps=self._taps, chunk=self._prefill_chunk):
                self._commit([p], [tokens], features, (len(tokens),), verdict=None)
        return self._state
