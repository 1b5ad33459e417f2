"""Character spans and token positions -> loss mask. The one place where a 1 is written.

Rules (docs/rules.md): a target token lies wholly inside an emission; one that straddles the start of a span is not trained and
is counted; `loss_mask[k] == 1` says that token k itself is a target (shifting is `load`'s business).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .encoding import Edge
from .example import Span

Mask = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Emission:
    """One assistant turn's characters and the policy's word on it; `reason` is empty for a trained turn."""

    message: int
    start: int
    end: int
    reason: str = ""


def mask_tokens(
    edges: Mapping[int, Edge], tokens: int, emissions: Sequence[Emission], straddle: str = "exclude", whole_end: bool = False
) -> tuple[Mask, tuple[Span, ...], int]:
    """Mark the tokens of the trained emissions.

    Args:
        edges: where the tokens part at each emission border (`Encoder.encode`).
        tokens: how many there are.
        emissions: ascending, not overlapping.
        straddle: `exclude` or `include` a token that begins before an emission and ends in it.
        whole_end: train a token that begins in an emission and ends behind it (SpecForge's prefix lengths count it).

    Returns:
        uint8 mask `[tokens]`, the span table, and how many tokens straddle a border.
    """
    mask: Mask = np.zeros(tokens, dtype=np.uint8)
    spans: list[Span] = []
    straddles = 0
    for emission in emissions:
        start, end = edges[emission.start], edges[emission.end]
        first, last = start.token, end.token
        if first > 0 and not start.clean:
            # the token before covers characters on both sides (or composed with them, under NFC)
            straddles += 1
            first -= straddle == "include"
        if last > first and end.over:
            straddles += 1
            last -= not whole_end
        last = max(first, last)
        spans.append(Span(emission.message, first, last, not emission.reason, emission.reason))
        if not emission.reason:
            mask[first:last] = 1
    return mask, tuple(spans), straddles
