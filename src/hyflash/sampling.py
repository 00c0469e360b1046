"""From target logits to a token: penalties, bias, temperature, top-k, top-p, min-p and a counter-based draw.

In: one row of logits, the request's parameters and the tokens so far. Out: the token at that absolute position.
The draw inverts the distribution's cumulative sum (in vocabulary order) at one uniform number that is a function
of (seed, position) alone, so a text depends on nothing but the target's distribution and the seed.

With `draft_sampling` a draft is itself a sample, of the drafter's distribution q, and is accepted with chance
min(1, p / q), where p is the target's; else the token is drawn from what p has above q. In all that is p (speculative
sampling: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318), but no longer the same token for a seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hyflash.core import Draw, SamplingParams, TokenLogprob

_LARGEST = torch.finfo(torch.float32).max
ACCEPTING, DRAFTING = 1, 2
"""Streams of uniform numbers beside that of the tokens, 0. Draft k of a block has DRAFTING + k: a position is drafted
again in later rounds, and what an earlier round came to must say nothing about the new draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A chosen token; moving every logit by less than `margin`, each its own way, does not change it."""

    token_id: int
    margin: float
    finite: bool
    logprob: TokenLogprob | None = None


class Proposed(NamedTuple):
    """A draft token and the distribution (V,) it is a sample of; None where it was certain."""

    token_id: int
    probs: Tensor | None


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """The uniform number in (0, 1) of one position: Philox keyed by seed and position, stable for ever. Streams, which
    differ in the counter, are independent of one another."""
    key = np.array([seed, position], dtype=np.uint64)  # a list with a seed of 2**63 or more would become floats
    counter = np.array([0, stream, 0, 0], dtype=np.uint64)
    bits = int(np.random.Philox(counter=counter, key=key).random_raw())
    return float(((bits >> 11) + 0.5) * 2.0**-53)


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the token is the argmax of the raw logits, so that whole blocks can be decided at once."""
    return params.temperature == 0 and params.logprobs is None and not _changes_logits(params)


def _changes_logits(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.min_tokens
    )


def adjust(
    logits: Tensor, params: SamplingParams, *, prompt: Sequence[int], generated: Sequence[int], banned: Sequence[int]
) -> Tensor:
    """Logits (V,) float32 after penalties and bias, in transformers' order; `banned` ids become -inf.

    Repetition counts prompt and generated tokens (transformers); presence and frequency only generated ones (OpenAI).
    """
    if not (_changes_logits(params) or banned):
        return logits
    out = logits.float().clone()
    V = out.shape[0]
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted({t for t in (*prompt, *generated) if t < V}), dtype=torch.long)
        seen = out[ids]
        out[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and generated:
        counts = Counter(generated)
        ids = torch.tensor(list(counts), dtype=torch.long)
        times = torch.tensor(list(counts.values()), dtype=torch.float32)
        out[ids] -= (params.presence_penalty + params.frequency_penalty * times).nan_to_num(0.0)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    out.clamp_(-_LARGEST, _LARGEST)  # infinity has no place in a distribution
    if banned:
        out[torch.tensor(list(banned), dtype=torch.long)] = float("-inf")
    return out


def warp(logits: Tensor, params: SamplingParams) -> tuple[Tensor, float]:
    """Temperature, top-k, top-p, min-p on logits (V,), in transformers' order.

    Returns the warped logits (-inf outside the support, float64) and a distance, in logits of the un-tempered scale:
    moving every logit by less leaves the support as it is.
    """
    out = (logits.double() - logits.max()) / params.temperature  # the largest is 0, so no temperature overflows
    near = float("inf")
    if 0 < params.top_k < out.shape[0]:
        top = out.topk(params.top_k + 1).values
        near = min(near, float(top[-2] - top[-1]) / 2)
        out = out.masked_fill(out < top[-2], float("-inf"))
    if params.top_p < 1.0:
        ordered, index = out.sort(descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass strictly before each token
        keep = before < params.top_p
        # A cumulative probability moves by less than the logits do; at the border tokens can also trade places.
        near = min(near, float((before - params.top_p).abs().min()))
        if 0 < (last := int(keep.sum())) < out.shape[0]:
            near = min(near, float(ordered[last - 1] - ordered[last]) / 2)
        out = torch.full_like(out, float("-inf")).scatter(0, index[keep], ordered[keep])
    if params.min_p > 0.0:
        floor = out.max() + float(np.log(params.min_p))
        near = min(near, float((out[out.isfinite()] - floor).abs().min()) / 2)
        out = out.masked_fill(out < floor, float("-inf"))
    return out, near * params.temperature


def choose(
    logits: Tensor,
    params: SamplingParams,
    *,
    position: int,
    prompt: Sequence[int],
    generated: Sequence[int],
    banned: Sequence[int] = (),
    draft: Proposed | None = None,
) -> Choice:
    """The token at absolute `position` from logits (V,). NaN or infinity in the logits give `finite=False`.

    A sampled request with a `draft` takes that or another token, together with the target's distribution. With
    `draft_sampling` no seed promises a token, so the margin is infinite.
    """
    if not bool(torch.isfinite(logits.max())):  # max() propagates NaN
        return Choice(token_id=0, margin=0.0, finite=False)
    adjusted = adjust(logits, params, prompt=prompt, generated=generated, banned=banned)
    if not bool(adjusted.max() > float("-inf")):
        return Choice(token_id=0, margin=0.0, finite=False)
    if params.temperature == 0:
        token, margin = _argmax(adjusted)
    elif draft is None:
        token, margin = _draw(adjusted, params, position)
    else:
        token, margin = _accept(adjusted, params, position, draft), float("inf")
    if params.draft_sampling:
        margin = float("inf")
    margin /= max(params.repetition_penalty, 1 / params.repetition_penalty)  # which widens every move of a logit
    logprob = _logprob(adjusted, params, token) if params.logprobs is not None else None
    return Choice(token_id=token, margin=margin, finite=True, logprob=logprob)


def _argmax(logits: Tensor) -> tuple[int, float]:
    """First largest logit and half its lead over the second, since both may move."""
    top = logits.topk(min(2, logits.shape[0])).values
    return int(logits.argmax()), float(top[0] - top[-1]) / 2 if top.shape[0] > 1 else float("inf")


def _draw(logits: Tensor, params: SamplingParams, position: int) -> tuple[int, float]:
    """Token whose cumulative interval holds this position's uniform number.

    The margin is the distance to the interval's nearer end: moving every logit by at most d moves an end by less
    than d / temperature. The thresholds of the filters count too.
    """
    warped, near = warp(logits, params)
    number = uniform(params.seed, position)
    token, ends = _invert(warped.softmax(-1), number)
    total = float(ends[-1])
    at = number * total
    low, high = float(ends[token - 1]) if token else 0.0, float(ends[token])
    distance = min(at - low if low > 0 else float("inf"), high - at if high < total else float("inf"))
    return token, min(near, distance * params.temperature)


def _invert(weights: Tensor, number: float) -> tuple[int, Tensor]:
    """Token whose interval of the cumulative sum of weights (V,) holds the share `number`, and the intervals' ends.

    A token without weight has an empty interval.
    """
    ends = weights.cumsum(-1)
    token = int(torch.searchsorted(ends, number * float(ends[-1]), right=True))
    if token >= ends.shape[0]:  # rounding put it on the last end: the last token of the support is meant
        token = int(weights.nonzero()[-1])
    return token, ends


def _accept(logits: Tensor, params: SamplingParams, position: int, draft: Proposed) -> int:
    """The draft with chance min(1, p / q), else a token of max(p - q, 0), in which the draft has no share."""
    p, token = warp(logits, params)[0].softmax(-1), draft.token_id
    if draft.probs is None:
        q, rest = 1.0, p.clone()
        rest[token] = 0.0
    else:
        q, rest = float(draft.probs[token]), (p - draft.probs.to(p)).clamp(min=0.0)
    if uniform(params.seed, position, ACCEPTING) * q < float(p[token]):
        return token
    # Nothing is left where p and q differ by rounding only.
    return _invert(rest if bool(rest.sum() > 0) else p, uniform(params.seed, position))[0]


def sample(logits: Tensor, draw: Draw, index: int) -> tuple[int, Tensor]:
    """Draft `index` of a block from a drafter's logits (V,), and the distribution (V,) float64 it is a sample of.

    Temperature and filters are the request's, so that a good drafter's distribution is near the target's.
    """
    probs = warp(logits, draw.params)[0].softmax(-1)
    number = uniform(draw.params.seed, draw.position + index, DRAFTING + index)
    return _invert(probs, number)[0], probs


def _logprob(adjusted: Tensor, params: SamplingParams, token: int) -> TokenLogprob:
    """Log-probabilities under the processed distribution (temperature 0 reports the one of temperature 1)."""
    warped = warp(adjusted, params)[0] if params.temperature > 0 else adjusted.double()
    logs = warped.log_softmax(-1)
    top = logs.topk(min(params.logprobs or 0, logs.shape[0]))
    pairs = tuple((int(i), float(v)) for v, i in zip(*top, strict=True) if v > float("-inf")) if params.logprobs else ()
    return TokenLogprob(token_id=token, logprob=float(logs[token]), top=pairs)
