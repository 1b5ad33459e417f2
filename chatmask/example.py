"""What comes out of the parser and goes to the disk: a span of one message, an example with all that is known of it, a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .parsers.turns import Turn


class Span(NamedTuple):
    """What one message occupies in a row, and whether it is trained.

    Attributes:
        message: index of the message in the sample, from 0; a system message that the spec adds is not counted. A sample that begins
            within its record (`overlength`) counts from its own first message.
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


def by_turn(spans: Sequence[Span]) -> list[tuple[Span, ...]]:
    """The spans of each assistant turn: one, or where only some of the turn is trained several that lie end to end, trained and
    not by turns."""
    turns: list[tuple[Span, ...]] = []
    last: Span | None = None
    for span in spans:
        if last and last.message == span.message and last.end == span.start and last.trained != span.trained:
            turns[-1] = (*turns[-1], span)
        else:
            turns.append((span,))
        last = span
    return turns


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


@dataclass(frozen=True)
class Example:
    """One sample, ready for training.

    Attributes:
        text: the rendered conversation.
        ids: int32 `[tokens]`.
        mask: uint8 `[tokens]`; 1 where the token is a target. Not shifted.
        spans: one per assistant turn, several where parts of it are not trained (`by_turn`); ascending, half-open token ranges with
            a reason where not trained.
        rewritten: message index -> `context` or `emission`, for turns that the template renders otherwise than served.
        control_text: control-token literals found in content.
        straddles: tokens that straddle a span border.
        content_dropped: assistant messages of which a declared part was left out.
        notes: further counts (`reasoning_stripped`, `conversations_ignored`, ...).
        parity: what the oracle found, empty where it was not asked.
        compared: at how many turns it was asked.
        turns: the assistant turns in character offsets of `text`, in the order of `by_turn(spans)` and with the same `message`.
    """

    text: str
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    spans: tuple[Span, ...]
    rewritten: Mapping[int, str] = field(default_factory=dict)
    control_text: int = 0
    straddles: int = 0
    content_dropped: int = 0
    notes: Mapping[str, int] = field(default_factory=dict)
    parity: tuple[ParityBreak, ...] = ()
    turns: tuple[Turn, ...] = ()
    compared: int = 0

    def same_row(self, other: Example) -> bool:
        """Would both be written as the same row, and counted alike."""
        return (
            np.array_equal(self.ids, other.ids)
            and np.array_equal(self.mask, other.mask)
            and (self.spans, dict(self.rewritten), dict(self.notes)) == (other.spans, dict(other.rewritten), dict(other.notes))
        )

    @property
    def input_ids(self) -> list[int]:
        """Token ids as a list."""
        return [int(i) for i in self.ids]

    @property
    def loss_mask(self) -> list[int]:
        """Loss mask as a list of 0 and 1, one per token."""
        return [int(i) for i in self.mask]


@dataclass(frozen=True)
class ParityBreak:
    """A turn whose training prefix is not what the server would have sent.

    Attributes:
        message: index of the assistant message.
        kind: `text` or `tokens`.
        declared: True where the spec says so (`prefix_stable: false`, a straddle).
        detail: the first difference, served beside trained.
    """

    message: int
    kind: str
    declared: bool
    detail: str
