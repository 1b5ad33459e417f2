"""Character spans and token positions -> loss mask. The one place where a 1 is written.

Rules (docs/rules.md): a target token lies wholly inside an emission; one that straddles the start of a span is not trained and
is counted; `loss_mask[k] == 1` says that token k itself is a target (shifting is `load`'s business).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .encoding import Edge
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
    edges: Mapping[int, Edge], tokens: int, emissions: Sequence[Emission], straddle: str = "exclude", whole_end: bool = False
) -> tuple[Mask, tuple[Span, ...], int]:
    """Mark the tokens of the trained emissions.

    Args:
        edges: where the tokens part at each border of emissions and of their parts (`Encoder.encode`).
        tokens: how many there are.
        emissions: ascending, not overlapping.
        straddle: `exclude` or `include` a token that begins before an emission and ends in it.
        whole_end: train a token that begins in an emission and ends behind it (SpecForge's prefix lengths count it).

    Returns:
        uint8 mask `[tokens]`, the span table, and how many tokens straddle a border. An emission is one span, or where some of it
        is not trained several, that lie end to end; a token across the border of a part is not trained.
    """
    mask: Mask = np.zeros(tokens, dtype=np.uint8)
    spans: list[Span] = []
    straddles = 0
    for emission in emissions:
        first, last, across = bounds(edges, emission, straddle, whole_end)
        straddles += across
        if not emission.reason:
            mask[first:last] = 1
        if emission.reason or not emission.parts:
            spans.append(Span(emission.message, first, last, not emission.reason, emission.reason))
            continue
        for part in emission.parts:
            begin, behind = (edges[border] for border in part)
            low, high = max(first, begin.token - begin.over), min(last, behind.token)
            if low < high:
                mask[low:high] = 0
                astride = {*range(low, min(begin.token, high)), *range(max(behind.token - behind.over, low), high)}
                straddles += len(astride)
        cuts = [first, *(first + 1 + np.flatnonzero(np.diff(mask[first:last]))).tolist(), last]
        spans += [
            Span(emission.message, a, b, bool(mask[a]), "" if mask[a] else emission.part_reason)
            for a, b in pairwise(cuts)
            if b > a
        ]
    return mask, tuple(spans), straddles


def bounds(
    edges: Mapping[int, Edge], emission: Emission, straddle: str = "exclude", whole_end: bool = False
) -> tuple[int, int, int]:
    """First token of an emission, one past its last, and how many tokens straddle its two borders. Arguments as `mask_tokens`."""
    start, end = edges[emission.start], edges[emission.end]
    first, last, straddles = start.token, end.token, 0
    if first > 0 and not start.clean:
        # the token before covers characters on both sides (or composed with them, under NFC)
        straddles += 1
        first -= straddle == "include"
    if last > first and end.over:
        straddles += 1
        last -= not whole_end
    return first, max(first, last), straddles
