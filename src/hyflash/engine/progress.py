"""One request on its way: the tokens so far and the single rule by which a token is committed.

In: tokens chosen by the target, one by one. Out: when the request ends and why. Stop tokens, stop strings and
budgets are decided here and nowhere else, for plain and speculative decoding alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hyflash.core import Event, FinishReason, Request, Result, RoundTrace, SamplingParams, TargetInfo, TokenLogprob
from hyflash.errors import UserError
from hyflash.sampling import is_plain_greedy
from hyflash.text import TextStream, Tokenizer


def check_request(request: Request, info: TargetInfo) -> None:
    """Raises UserError for a request that this target cannot serve."""
    if not request.prompt_ids:
        raise UserError("the prompt is empty; expected at least one token.")
    bad = [t for t in request.prompt_ids if not 0 <= t < info.vocab_size]
    if bad:
        raise UserError(f"prompt token {bad[0]} is outside the vocabulary of {info.name} (0 to {info.vocab_size - 1}).")
    if len(request.prompt_ids) >= info.max_context:
        raise UserError(
            f"the prompt has {len(request.prompt_ids)} tokens; {info.name} holds {info.max_context} "
            "with at least one for the answer. Shorten the prompt."
        )


def check_params(params: SamplingParams, info: TargetInfo) -> None:
    """Raises UserError for tokens that are not in the vocabulary."""
    for token in (*params.logit_bias, *params.stop_token_ids):
        if not 0 <= token < info.vocab_size:
            raise UserError(f"token {token} is outside the vocabulary of {info.name} (0 to {info.vocab_size - 1}).")


class Progress:
    """Mutable state of one request inside the engine."""

    def __init__(
        self,
        request_id: int,
        request: Request,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        max_context: int,
    ) -> None:
        params = request.params
        self.request_id = request_id
        self.request = request
        self.params = params
        self.is_plain_greedy = is_plain_greedy(params)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.rounds: list[RoundTrace] = []
        self.stream = TextStream(tokenizer, params.stop)
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self.budget = min(params.max_tokens, max_context - len(request.prompt_ids))
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.warnings: list[str] = []
        self.row = -1
        self.seq = -1
        self.num_prefilled = 0
        self.num_alone = 0
        """Cached tokens whose keys and values are those of plain decoding without company (kept for rechecks)."""
        self.submitted_sec = time.perf_counter()
        self.decode_start_sec = self.first_token_sec = self.last_token_sec = 0.0
        self.draft_state_bytes = 0

    @property
    def anchor(self) -> int:
        """The last committed token, whose features do not exist yet."""
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.budget - len(self.token_ids)

    @property
    def banned(self) -> tuple[int, ...]:
        """Stop tokens that may not be chosen yet (min_tokens)."""
        return tuple(sorted(self.stop_ids)) if len(self.token_ids) < self.params.min_tokens else ()

    def push(self, token_id: int, logprob: TokenLogprob | None) -> bool:
        """Commit one token; True when the request ends with it."""
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        enough = len(self.token_ids) >= self.params.min_tokens
        is_stop = token_id in self.stop_ids and enough
        hit = False if is_stop else self.stream.push(token_id, watch=enough)
        if is_stop or hit:
            self.finish("stop")
        elif self.remaining <= 0:
            self.finish("length")
        return self.finish_reason is not None

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request; the first reason stands."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.error = error
            self.stream.finish()

    def event(self, tokens: tuple[int, ...], drafted: int, accepted: int) -> Event:
        """What a round did to it; the text is what has become certain since the last event."""
        return Event(
            request_id=self.request_id,
            token_ids=tokens,
            text=self.stream.take(final=self.finish_reason is not None),
            logprobs=tuple(self.logprobs[-len(tokens) :]) if tokens else (),
            num_drafted=drafted,
            num_accepted=accepted,
            finish_reason=self.finish_reason,
            error=self.error,
        )

    def result(self) -> Result:
        """The finished request."""
        assert self.finish_reason is not None
        return Result(
            request_id=self.request_id,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self.token_ids),
            text=self.stream.text,
            finish_reason=self.finish_reason,
            rounds=tuple(self.rounds),
            ttft_sec=max(0.0, self.first_token_sec - self.submitted_sec),
            decode_sec=max(0.0, self.last_token_sec - self.decode_start_sec),
            draft_state_bytes=self.draft_state_bytes,
            logprobs=tuple(self.logprobs),
            error=self.error,
            warnings=tuple(self.warnings),
        )
