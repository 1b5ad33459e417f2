"""Character spans and token positions -> loss mask. The one place where a 1 is written.

Rules (docs/rules.md): a target token lies wholly inside an emission; one that straddles the start of a span is not trained and
is counted; `loss_mask[k] == 1` says that token k itself is a target (shifting is `load`'s business).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .encoding import Ids
from .example import Span

Mask = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Emission:
    """One assistant turn's characters and the policy's word on it.

    Attributes:
        message, start, end: which message, and its characters (half open).
        reason: why the turn is not trained; empty for one that is.
        parts: characters inside a trained turn that are not trained; ascending, not overlapping.
        part_reason: why not.
    """

    message: int
    start: int
    end: int
    reason: str = ""
    parts: tuple[tuple[int, int], ...] = ()
    part_reason: str = ""


def mask_tokens(
    starts: Ids, ends: Ids, emissions: Sequence[Emission], straddle: str = "exclude", whole_end: bool = False
) -> tuple[Mask, tuple[Span, ...], int]:
    """Mark the tokens of the trained emissions.

    Args:
        starts, ends: int32 `[tokens]`, character offsets of each token, exact around every border of emissions and of their parts.
        emissions: ascending, not overlapping.
        straddle: `exclude` or `include` a token that begins before an emission and ends in it.
        whole_end: train a token that begins in an emission and ends behind it (SpecForge's prefix lengths count it).

    Returns:
        uint8 mask `[tokens]`, the span table, and how many tokens straddle a border. An emission is one span, or where some of it
        is not trained several, that lie end to end; a token across the border of a part is not trained.
    """
    mask: Mask = np.zeros(len(starts), dtype=np.uint8)
    spans: list[Span] = []
    straddles = 0
    for emission in emissions:
        first = int(np.searchsorted(starts, emission.start, side="left"))
        if first > 0 and (ends[first - 1] > emission.start or first == len(starts) or starts[first] != emission.start):
            # the token before covers characters on both sides (or composed with them, under NFC)
            straddles += 1
            first -= straddle == "include"
        last = int(np.searchsorted(starts, emission.end, side="left"))
        if last > first and ends[last - 1] > emission.end:
            straddles += 1
            last -= not whole_end
        last = max(first, last)
        if not emission.reason:
            mask[first:last] = 1
        if emission.reason or not emission.parts:
            spans.append(Span(emission.message, first, last, not emission.reason, emission.reason))
            continue
        for start, end in emission.parts:
            touched = first + np.flatnonzero((ends[first:last] > start) & (starts[first:last] < end))
            mask[touched] = 0
            straddles += int(((starts[touched] < start) | (ends[touched] > end)).sum())
        edges = [first, *(first + 1 + np.flatnonzero(np.diff(mask[first:last]))).tolist(), last]
        spans += [
            Span(emission.message, a, b, bool(mask[a]), "" if mask[a] else emission.part_reason)
            for a, b in pairwise(edges)
            if b > a
        ]
    return mask, tuple(spans), straddles
