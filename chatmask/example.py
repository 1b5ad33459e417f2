"""The two values that travel from the masks to the disk: a span of one message, and a finished row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Span:
    """What one message occupies in a row, and whether it is trained.

    Attributes:
        message: index of the message in the sample.
        start: first token of the span (a whole token: one that straddles the border stays outside).
        end: one past the last token, so `input_ids[start:end]` are the span's tokens.
        trained: True where `loss_mask` is 1 over the whole span, False where it is 0 over the whole span.
        reason: empty for a trained span, else the code that says why it is not trained.
    """

    message: int
    start: int
    end: int
    trained: bool
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training row, as it is written to a shard.

    Attributes:
        input_ids: int32 `[tokens]`.
        loss_mask: uint8 `[tokens]`; 1 means that this token is a target. Not shifted.
        spans: ordered and non-overlapping; `loss_mask` is 1 exactly on the trained ones.
        file: the input file that the row came from, as the manifest names it.
        line: line number in that file, from 1.
        index: which sample of the record this is, from 0 (one record may give several).
        variant: which variant of the sample this is, from 0.
    """

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    spans: tuple[Span, ...]
    file: str
    line: int
    index: int
    variant: int
