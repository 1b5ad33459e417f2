"""One row as a reader sees it: its text, decoded from the ids, cut into trained, untrained, header and context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from .encoding import Ids
from .errors import DamagedDataset
from .example import Example, Span, by_turn
from .inspecting_text import in_words
from .templates.spec import TemplateSpec
from .tokenizers import Tokenizer

Kind = Literal["supervised", "context", "header", "untrained"]


@dataclass(frozen=True)
class Segment:
    """A piece of a row's text, all of one kind.

    Attributes:
        kind: `supervised` (trained), `header` (the generation prompt of an assistant turn), `untrained` (sampled by the model,
            but not trained), `context` (everything else).
        text: the piece; the pieces of a row, put together, are its text.
        note: why it is of that kind, or empty.
    """

    kind: Kind
    text: str
    note: str = ""


@dataclass(frozen=True)
class InspectedSpan:
    """One assistant turn of a row, or a piece of one that is trained in part.

    Attributes:
        message: index of the message in the sample.
        start, end: token indices, half open.
        text: the decoded tokens of the span.
        trained: True where the loss mask is 1 over the span.
        reason: empty for a trained span, else the code that says why it is not trained.
        piece: which piece of its turn this is, from 0.
        rewritten: `context` or `emission` where the template renders the turn otherwise than it was served, else empty. A dataset
            keeps no such column: there it says what header and reason give away.
        straddles: True where a token lies across the border between header and turn.
    """

    message: int
    start: int
    end: int
    text: str
    trained: bool
    reason: str
    rewritten: str = ""
    straddles: bool = False
    piece: int = 0


@dataclass(frozen=True)
class Rejection:
    """Why a raw line gives no row: reason code, what was found, what to do, and the message at fault (or None)."""

    reason: str
    detail: str
    advice: str
    message: int | None


@dataclass(frozen=True)
class Inspected:
    """One row of a dataset, or one line of a raw input, as a reader sees it.

    Attributes:
        row: row of the dataset, or index among the non-blank lines of the input; from 0.
        file: the input file, as the build or the caller named it.
        line: line number in that file, from 1.
        text: the decoded tokens of the row.
        tokens, supervised_tokens: how many.
        spans: one per assistant turn, ascending.
        segments: `text` in pieces, none of them empty.
        reject: why a raw line gives no row; then everything above is empty.
        notes: what else a reader should know, one sentence each.
        spec: name of the spec.
        tokenizer: what to call the tokenizer.
        sample, variant: which sample of the line this is, and which variant of it.
    """

    row: int
    file: str
    line: int
    text: str
    tokens: int
    supervised_tokens: int
    spans: tuple[InspectedSpan, ...]
    segments: tuple[Segment, ...]
    reject: Rejection | None = None
    notes: tuple[str, ...] = ()
    spec: str = ""
    tokenizer: str = ""
    sample: int = 0
    variant: int = 0

    @property
    def turns(self) -> list[list[InspectedSpan]]:
        """The spans by turn: one each, several for a turn that is trained in part."""
        found: list[list[InspectedSpan]] = []
        for span in self.spans:
            if span.piece:
                found[-1].append(span)
            else:
                found.append([span])
        return found


@dataclass(frozen=True)
class _Header:
    start: int
    end: int
    history: bool


class View:
    """One row's text and segments. `example` is what the parser gave, or None where only the dataset's columns are known."""

    def __init__(
        self, tokenizer: Tokenizer, spec: TemplateSpec, ids: Ids, spans: Sequence[Span], example: Example | None, where: str
    ) -> None:
        self.tokenizer, self.spec, self.ids, self.spans, self.example = tokenizer, spec, ids, spans, example
        unknown = [int(i) for i in np.unique(ids) if tokenizer.whole.id_to_token(int(i)) is None]
        if unknown:
            raise DamagedDataset(f"{where}: the id {unknown[0]} is none of the tokenizer's; build again")
        self.text = tokenizer.decode(ids)
        self._cuts = self._cut_all(sorted({border for span in spans for border in (span.start, span.end)}))
        both = [spec.for_sample(True), spec.for_sample(False)]
        self._served = {variant.assistant.header for variant in both}
        self._headers = sorted({h for variant in both for h in variant.assistant.headers if h}, key=len, reverse=True)

    def inspected(self, row: int, file: str, line: int, sample: int, variant: int) -> Inspected:
        """Everything about the row."""
        # only the first span of a turn has a header before it
        headers = [self._header(turn[0]) if span is turn[0] else None for turn in by_turn(self.spans) for span in turn]
        name = "demo tokenizer" if self.tokenizer.demo else self.tokenizer.name
        pieces = [n for turn in by_turn(self.spans) for n in range(len(turn))]
        spans = tuple(self._span(*given) for given in zip(self.spans, headers, pieces, strict=True))
        supervised = sum(span.end - span.start for span in self.spans if span.trained)
        segments = tuple(self._segments(headers))
        notes = tuple(self._notes(headers))
        return Inspected(
            row,
            file,
            line,
            self.text,
            len(self.ids),
            supervised,
            spans,
            segments,
            None,
            notes,
            self.spec.name,
            name,
            sample,
            variant,
        )

    # A token border may fall inside a character (byte-level BPE): it is then put before that character, so none is lost or doubled.

    def _cut(self, border: int) -> int:
        """Character offset of a token border."""
        if border not in self._cuts:
            prefix = self.tokenizer.decode(self.ids[:border])
            whole = self.text.startswith(prefix)
            self._cuts[border] = len(prefix) if whole else _common(prefix, self.text)
        return self._cuts[border]

    def _cut_all(self, borders: Sequence[int]) -> dict[int, int]:
        """Offsets of many borders from one pass over the tokens, where the pieces' texts add up to the whole's."""
        edges = [0, *borders, len(self.ids)]
        pieces = [self.tokenizer.decode(self.ids[a:b]) for a, b in pairwise(edges)]
        if "".join(pieces) != self.text:
            return {}
        ends = np.cumsum([0, *map(len, pieces)])
        return {border: int(end) for border, end in zip(borders, ends[1:], strict=False)}

    def _header(self, span: Span) -> _Header | None:
        """The header that ends where the span begins; a token that straddles that border puts the end up to a token away."""
        start = self._cut(span.start)
        found = self._header_at(start)
        before = self._cut(span.start - 1) if span.start > 0 else start
        after = self._cut(span.start + 1) if self.spec.straddle == "include" and span.start < span.end else start
        for at in (*range(start - 1, before, -1), *range(start + 1, after)):
            found = found or self._header_at(at)
        return found

    def _header_at(self, end: int) -> _Header | None:
        for header in self._headers:
            if end >= len(header) and self.text.startswith(header, end - len(header)):
                return _Header(end - len(header), end, header not in self._served)
        return None

    def _span(self, span: Span, header: _Header | None, piece: int) -> InspectedSpan:
        start, end = self._cut(span.start), self._cut(span.end)
        rewritten = {"history_rewritten": "emission", "context_rewritten": "context"}.get(span.reason, "")
        if not rewritten and header is not None and header.history:
            rewritten = "context"
        if self.example is not None:
            rewritten = self.example.rewritten.get(span.message, "")
        straddles = header is not None and header.end != start
        return InspectedSpan(
            span.message, span.start, span.end, self.text[start:end], span.trained, span.reason, rewritten, straddles, piece
        )

    def _segments(self, headers: Sequence[_Header | None]) -> Iterator[Segment]:
        marks: list[tuple[int, int, Kind, str]] = []
        for span, header in zip(self.spans, headers, strict=True):
            start, end = self._cut(span.start), self._cut(span.end)
            if header is not None:
                form = "written by the template in history" if header.history else "generation prompt"
                marks.append((header.start, min(header.end, start), "header", form))
                if header.end < start:
                    marks.append((header.end, start, "untrained", in_words("straddle")))
            marks.append((start, end, "supervised", "") if span.trained else (start, end, "untrained", in_words(span.reason)))
        position = 0
        for start, end, kind, note in [*marks, (len(self.text), len(self.text), "context", "")]:
            start = max(start, position)
            if start > position:
                yield Segment("context", self.text[position:start])
            if end > start:
                yield Segment(kind, self.text[start:end], note)
            position = max(start, end)

    def _notes(self, headers: Sequence[_Header | None]) -> Iterator[str]:
        first = {turn[0] for turn in by_turn(self.spans)}
        for span, header in zip(self.spans, headers, strict=True):
            if header is None and self._headers and span in first:
                yield f"message {span.message}: no header of the spec stands right before the turn"
        example = self.example
        if example is None:
            return
        if example.text != self.text:
            at = _common(example.text, self.text)
            yield (
                f"the tokens decode to other text than was rendered (the tokenizer normalises it): at character {at} "
                f"{example.text[at : at + 30]!r} became {self.text[at : at + 30]!r}"
            )
        if example.control_text:
            yield f"content holds {example.control_text} control-token literals, kept as text or as markers that the model writes itself"
        if example.content_dropped:
            yield f"{example.content_dropped} messages lack a part that the template leaves out and the spec declares under `drops:`"
        yield from (f"{name.replace('_', ' ')}: {count}" for name, count in example.notes.items() if count)
        for broken in example.parity:
            known = "as the spec declares" if broken.declared else "which the spec does not declare: a build fails here"
            yield f"message {broken.message}: the served prompt differs ({broken.kind}), {known}; {broken.detail}"


def _common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
