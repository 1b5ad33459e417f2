"""Control tokens and encoding: text that nobody but the template made structural cannot become a control token."""

from __future__ import annotations

import bisect
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import tokenizers as hf

from . import backends
from .canonical import first_unequal
from .errors import TokenizerError
from .templates.environment import constants

if TYPE_CHECKING:
    from .tokenizers import Tokenizer

SPELLING_PAYS = 64  # borders after which the bytes of all tokens are worth a third of a second

Ids = np.ndarray[Any, np.dtype[np.int32]]
Control = tuple[int, int, int]  # start, end (characters), id


@dataclass(frozen=True, slots=True)
class Request:
    """A text to be encoded.

    Attributes:
        text: the final text.
        controls: (start, end, id) of the control tokens in it, ascending.
        borders: character offsets at which the caller needs to know token positions.
        quoted: content may hold control literals, so the text must not be encoded as it is.
    """

    text: str
    controls: Sequence[Control]
    borders: Sequence[int] = ()
    quoted: bool = True


Anchor = tuple[int, str]


@dataclass(frozen=True)
class Filling:
    """Texts of one shape: with the same control tokens in the same order, and the same borders (behind which of them, and the text
    between)."""

    texts: Sequence[str]
    controls: Sequence[int]
    anchors: Sequence[Anchor]


@dataclass(frozen=True)
class EncodedShape:
    """What a `Filling` gave, text by text.

    Attributes:
        ids: int32 `[tokens]` each.
        certain: whether the control tokens are the expected ones and all borders clean; nothing else is to be used where not.
        tokens: int64 `[texts, borders]`: the token at each border.
    """

    ids: Sequence[Ids]
    certain: Sequence[bool]
    tokens: np.ndarray[Any, np.dtype[np.int64]]


class Edge(NamedTuple):
    """Where tokens part at a character offset.

    Attributes:
        token: the first token that begins at or behind it.
        over: how many tokens begin before it and reach over it.
        clean: a token ends exactly here and another begins.
    """

    token: int
    over: int
    clean: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of one text, int32 `[tokens]`, and the edge at each border."""

    ids: Ids
    edges: Mapping[int, Edge] = field(default_factory=dict)


def control_tokens(tokenizer: Tokenizer, template: str, named: Iterable[str] = ()) -> dict[str, int]:
    """Control tokens by literal: tokens flagged special, and added tokens that the template can write by itself.

    An added token of white space alone (Gemma's runs of line breaks) is ordinary, unless it is flagged special.

    Args:
        tokenizer: whose added tokens count.
        template: the Jinja text; its string constants are searched.
        named: literals that the spec names (headers, tags, end tokens); added tokens inside them count too.
    """
    written = [*constants(template), *named]
    return {
        token.content: token.id
        for token in tokenizer.added.values()
        if token.content and (token.special or (token.content.strip() and any(token.content in text for text in written)))
    }


def matcher(literals: Iterable[str]) -> re.Pattern[str]:
    """One pattern for all literals, longest first where one begins another (as the `tokenizers` library matches)."""
    ordered = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


class Encoder:
    """Encodes text in which the positions of control tokens are known.

    Control tokens are written by id; the text between them is encoded piece by piece. On text without quoted control tokens the ids
    equal those of the whole text (proven at load on `PROBE_TEXTS`, and on a sample of every build). Where a piece gives a control id
    all the same (content quotes one, or normalisation makes one), the pieces are encoded by a copy of the tokenizer that has no
    control tokens, so text cannot become one.

    Some tokenizers do not let text be cut: a SentencePiece-like one puts a space before the first piece only, an added token may
    swallow the white space beside it. Then the whole text is encoded as it is.

    Attributes:
        whole_only: '' when text may be cut; else why not.
    """

    def __init__(self, tokenizer: Tokenizer, control: dict[str, int]) -> None:
        self.tokenizer = tokenizer
        self.control = control
        self.pattern = matcher(control)
        self.control_ids = np.array(sorted(control.values()), dtype=np.int32)
        self.whole_only = ""
        self.whole_only = self._first_difference(tokenizer.whole)
        self.pieces = backends.Pieces(tokenizer.whole)
        self.fast: backends.Fast | None = None
        self.seconds = 0.0  # spent in the tokenizers
        self._looked = 0
        self._learned: dict[str, tuple[int, bytes]] = {}  # text in front of a border -> how many tokens it is, and their ids

    def speed_up(self, proven: bool = False) -> str:
        """Take the fast tokenizer from now on, if it is installed and gives the same ids; '' or why not.

        Args:
            proven: it gave the same ids in the process that started this one.
        """
        if self.fast is not None:
            return ""
        if self.whole_only:
            return f"this tokenizer's text cannot be cut: {self.whole_only}"
        try:
            fast = backends.Fast(self.tokenizer.data)
        except ImportError:
            return "it is not installed: pip install 'chatmask[fast]'"
        except ValueError as error:
            return str(error)
        texts = [] if proven else [*PROBE_TEXTS, *backends.proof_texts(list(self.tokenizer.added))]
        expected = self.tokenizer.whole.encode_batch_fast(texts, add_special_tokens=False)
        ids, offsets = fast.flat(texts)
        for text, encoding, start, end in zip(texts, expected, offsets[:-1], offsets[1:], strict=True):
            if encoding.ids != ids[start:end].tolist():
                return f"{fast.name} gives {text[:40]!r} other ids: {ids[start:end][:8].tolist()}, not {encoding.ids[:8]}"
        self.fast = fast
        return ""

    @cached_property
    def plain(self) -> hf.Tokenizer:
        """The tokenizer without the control tokens; made when a row first needs it (it takes the time of loading one)."""
        data = dict(self.tokenizer.data)
        data["added_tokens"] = [item for item in data.get("added_tokens") or () if item["content"] not in self.control]
        data["truncation"] = data["padding"] = data["post_processor"] = None
        return hf.Tokenizer.from_str(orjson.dumps(data).decode())

    @cached_property
    def unquotable(self) -> str:
        """'' when control tokens quoted in content can be encoded as text; else why not: such rows must be refused."""
        return self.whole_only or self._first_difference(self.plain)

    @cached_property
    def _real_ids(self) -> Ids | None:
        """Ids of the copy -> ids of the tokenizer. The library numbers added tokens by their place in the list, so with the control
        tokens taken out the ordinary ones that are left may count otherwise. None where nothing differs."""
        kept = [token for token in self.tokenizer.added.values() if token.content not in self.control]
        moved = {self.plain.token_to_id(token.content): token.id for token in kept}
        if all(copy == real for copy, real in moved.items()):
            return None
        size = max(self.plain.get_vocab().values()) + 1
        table = np.arange(size, dtype=np.int32)
        for copy, real in moved.items():
            table[copy] = real
        return table

    def cut(self, text: str) -> list[tuple[int, int, int]]:
        """(start, end, id) of every control token in text that the template alone has written."""
        control = self.control
        return [(*match.span(), control[match.group()]) for match in self.pattern.finditer(text)]

    def encode(self, text: str, controls: Sequence[Control], borders: Sequence[int] = ()) -> Encoded:
        """Encode one text; as `encode_many`."""
        return self.encode_many([Request(text, controls, borders)])[0]

    def encode_many(self, requests: Sequence[Request]) -> list[Encoded]:
        """Encode texts in one go: ids without offsets, and token positions only around control tokens and borders.

        A text for which the short way is not certain (it quotes control tokens, or a token count does not add up) goes the long way
        (`with_offsets`), which is also what tests compare with.
        """
        found: list[Encoded | None] = [None] * len(requests)
        short = [i for i, request in enumerate(requests) if not self.whole_only and (self.fast is None or not request.quoted)]
        for i, encoded in zip(short, self._short([requests[i] for i in short]), strict=True):
            found[i] = encoded
        return [encoded or self._long(request) for encoded, request in zip(found, requests, strict=True)]

    def encode_filled(self, groups: Sequence[Filling]) -> list[EncodedShape]:
        """Encode texts of known shapes by the fast tokenizer, shape by shape.

        Args:
            groups: texts with the same control tokens and borders.

        Returns:
            For each group its texts' ids, and where the borders are; see `EncodedShape`.
        """
        ids, offsets, places, cuts = self._flat([text for group in groups for text in group.texts])
        found: list[EncodedShape] = []
        first = 0
        for group in groups:
            count, controls = len(group.texts), np.array(group.controls, np.int32)
            bounds, starts = cuts[first : first + count + 1], offsets[first : first + count]
            certain = np.diff(bounds) == len(controls)
            # a text with another number of control tokens is looked at in some place or other, and not believed
            own = np.minimum(bounds[:-1, None] + np.arange(len(controls)), max(len(places) - 1, 0))
            at = places[own]
            certain &= (ids[at] == controls).all(axis=1)
            tokens = np.empty((count, len(group.anchors)), np.int64)
            for n, (control, between) in enumerate(group.anchors):
                tokens[:, n] = at[:, control] + 1
                if between:
                    certain &= self._follows(between, ids, tokens[:, n], certain)
                    tokens[:, n] += self._learned[between][0] if between in self._learned else 0
            pieces = [ids[a:b] for a, b in pairwise(offsets[first : first + count + 1].tolist())]
            found.append(EncodedShape(pieces, certain.tolist(), tokens - starts[:, None]))
            first += count
        return found

    def _follows(self, between: str, ids: Ids, tokens: Any, certain: Any) -> Any:
        """For which texts the tokens from `tokens` on are those that spell `between`, with a border behind."""
        if between not in self._learned:
            for n in np.flatnonzero(certain)[:16].tolist():
                if self._inside(between, ids, int(tokens[n]), len(ids)) is not None:
                    break
        known = self._learned.get(between)
        if known is None:
            return np.zeros(len(tokens), np.bool_)
        expected = np.frombuffer(known[1], np.int32)
        window = np.minimum(tokens[:, None] + np.arange(len(expected)), len(ids) - 1)
        return (ids[window] == expected).all(axis=1)

    def _long(self, request: Request) -> Encoded:
        started = time.perf_counter()
        ids, starts, ends = self.with_offsets(request.text, request.controls, request.borders)
        self.seconds += time.perf_counter() - started
        return Encoded(ids, {border: edge_at(starts, ends, border) for border in request.borders})

    def _short(self, requests: Sequence[Request]) -> Iterable[Encoded | None]:
        """Ids and edges where they are certain, else None."""
        if not requests:
            return
        whole = self._whole(requests) if self.fast is not None else self._from_pieces(requests)
        for request, (ids, places) in zip(requests, whole, strict=True):
            expected = [identity for _, _, identity in request.controls]
            if len(places) != len(expected) or ids[places].tolist() != expected:
                yield None  # content quotes a control token, or normalisation makes one
                continue
            edges = self._edges(request, ids, places.tolist())
            yield None if edges is None else Encoded(ids, edges)

    def _whole(self, requests: Sequence[Request]) -> Iterable[tuple[Ids, Any]]:
        """Ids of each text, and which of them are control tokens: by the fast tokenizer, which finds those by itself."""
        ids, offsets, places, cuts = self._flat([request.text for request in requests])
        for i in range(len(requests)):
            yield ids[offsets[i] : offsets[i + 1]], places[cuts[i] : cuts[i + 1]] - offsets[i]

    def _flat(self, texts: Sequence[str]) -> tuple[Ids, Any, Any, Any]:
        """Ids of all texts in a row and where each begins; where control tokens stand in them, and from which of these each begins."""
        assert self.fast is not None
        started = time.perf_counter()
        ids, offsets = self.fast.flat(texts)
        self.seconds += time.perf_counter() - started
        places = np.flatnonzero(self._is_control[ids])
        return ids, offsets, places, np.searchsorted(places, offsets)

    def _from_pieces(self, requests: Sequence[Request]) -> Iterable[tuple[Ids, Any]]:
        """The same by the `tokenizers` library, from the pieces between control tokens."""
        pieces = [request.text[a:b] for request in requests for a, b in _between(request.controls, len(request.text))]
        started = time.perf_counter()
        encoded = iter(self.pieces.encode(pieces))
        self.seconds += time.perf_counter() - started
        for request in requests:
            parts: list[Ids] = []
            for _, _, identity in request.controls:
                parts += [next(encoded), np.array([identity], np.int32)]
            parts.append(next(encoded))
            ids = np.concatenate(parts)
            # a control id that no control token of the text accounts for shows as one too many
            yield ids, np.flatnonzero(self._is_control[ids])

    def _edges(self, request: Request, ids: Ids, places: Sequence[int]) -> dict[int, Edge] | None:
        """The edge at each border, from where the control tokens are; None where it is not certain."""
        controls, edges = request.controls, {}
        starts = [start for start, _, _ in controls]
        for border in request.borders:
            if border in edges:
                continue
            i = bisect.bisect_right(starts, border) - 1
            start, token = (controls[i][1], places[i] + 1) if i >= 0 else (0, 0)
            if i >= 0 and border == controls[i][0]:
                at: int | None = places[i]
            elif border == start:
                at = token
            elif border < start:
                return None
            elif border == (controls[i + 1][0] if i + 1 < len(controls) else len(request.text)):
                at = places[i + 1] if i + 1 < len(controls) else len(ids)
            else:
                stop = places[i + 1] if i + 1 < len(controls) else len(ids)
                at = self._inside(request.text[start:border], ids, token, stop)
            if at is None:
                end = controls[i + 1][0] if i + 1 < len(controls) else len(request.text)
                edge = self._by_offsets(request.text[start:end], border - start, ids[token:stop], token)
                if edge is None:
                    return None
                edges[border] = edge if edge.token < len(ids) else edge._replace(clean=False)
            else:
                edges[border] = Edge(at, 0, at < len(ids))
        return edges

    def _inside(self, before: str, ids: Ids, token: int, stop: int) -> int | None:
        """Which token begins behind the text `before`, with which the piece from `token` to `stop` begins; None if none does surely.

        The tokens must spell the text byte for byte: then nothing was normalised there, and the next token begins at the border.
        """
        known = self._learned.get(before)
        if known is not None and ids[token : token + known[0]].tobytes() == known[1]:
            return token + known[0]
        self._looked += 1
        if self._looked <= SPELLING_PAYS and self.fast is None:
            return None
        if self._spelled is None:
            return None
        left, at = before.encode(), token
        while left and at < stop:
            spelled = self._spelled[ids[at]]
            if not spelled or not left.startswith(spelled):
                return None
            left, at = left[len(spelled) :], at + 1
        if left:
            return None
        if len(before) <= 64 and len(self._learned) < 10_000:
            self._learned[before] = (at - token, ids[token:at].tobytes())
        return at

    def _by_offsets(self, piece: str, border: int, ids: Ids, token: int) -> Edge | None:
        """The edge inside one piece, from the offsets that the `tokenizers` library gives; None if its ids are others."""
        encoding = self.tokenizer.whole.encode(piece, add_special_tokens=False)
        if encoding.ids != ids.tolist():
            return None
        offsets = np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        edge = edge_at(offsets[:, 0], offsets[:, 1], border)
        # a piece ends where a control token begins, so a border behind its last token is not clean
        return Edge(edge.token + token, edge.over, edge.clean)

    @cached_property
    def _is_control(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        table = np.zeros(max([self.tokenizer.whole.get_vocab_size(), *self.control_ids.tolist()]) + 1, np.bool_)
        table[self.control_ids] = True
        return table

    @cached_property
    def _spelled(self) -> list[bytes] | None:
        """The bytes that each token stands for; None where the tokenizer does not say."""
        return spelled(self.tokenizer)

    def agrees(self, request: Request, ids: Ids) -> str:
        """'' when the reference way gives these ids, else the first difference."""
        expected, _, _ = self.with_offsets(request.text, request.controls)
        if np.array_equal(expected, ids):
            return ""
        at = first_unequal(expected.tolist(), ids.tolist())
        return f"token {at}: {ids[at : at + 4].tolist()}, not {expected[at : at + 4].tolist()}"

    def with_offsets(self, text: str, controls: Sequence[Control], borders: Iterable[int] = ()) -> tuple[Ids, Ids, Ids]:
        """Encode one text the long way.

        Args:
            text: the final text.
            controls: (start, end, id) of the control tokens in it, ascending.
            borders: character offsets at which the caller needs to know token positions.

        Returns:
            int32 `[tokens]` each: the ids, and the character offsets at which each token starts and ends. Offsets are exact for
            control tokens and in pieces that hold a border; elsewhere they are those of the piece.
        """
        if self.whole_only:
            encoding = self.tokenizer.whole.encode(text, add_special_tokens=False)
            offsets = np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2)
            whole = np.asarray(encoding.ids, dtype=np.int32)
            return self._with_control_edges(text, controls, whole, offsets[:, 0].copy(), offsets[:, 1].copy())
        found = self._encode_pieces(self.tokenizer.whole, text, controls, borders)
        return self._encode_pieces(self.plain, text, controls, borders) if self.foreign_control_ids(found[0], controls) else found

    def _encode_pieces(
        self, backend: hf.Tokenizer, text: str, controls: Sequence[Control], borders: Iterable[int]
    ) -> tuple[Ids, Ids, Ids]:
        real_ids = None if backend is self.tokenizer.whole else self._real_ids
        pieces = _between(controls, len(text))
        exact = _pieces_with_border(pieces, sorted(set(borders)))
        texts = [text[start:end] for start, end in pieces]
        fast = [i for i, piece in enumerate(texts) if piece and i not in exact]
        slow = sorted(exact)
        encoded: dict[int, Any] = dict(
            zip(fast, backend.encode_batch_fast([texts[i] for i in fast], add_special_tokens=False), strict=True)
        )
        encoded.update(zip(slow, backend.encode_batch([texts[i] for i in slow], add_special_tokens=False), strict=True))
        ids: list[int] = []
        counts: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        for i, (start, end) in enumerate(pieces):
            if i in encoded:
                got = encoded[i].ids if real_ids is None else real_ids[encoded[i].ids].tolist()
                ids += got
                if i in exact:
                    for a, b in encoded[i].offsets:
                        starts.append(start + a)
                        ends.append(start + b)
                    counts += [1] * len(got)
                else:
                    starts.append(start)
                    ends.append(end)
                    counts.append(len(got))
            if i < len(controls):
                ids.append(controls[i][2])
                starts.append(controls[i][0])
                ends.append(controls[i][1])
                counts.append(1)
        repeats = np.asarray(counts, dtype=np.int64)
        return (
            np.asarray(ids, dtype=np.int32),
            np.repeat(np.asarray(starts, dtype=np.int32), repeats),
            np.repeat(np.asarray(ends, dtype=np.int32), repeats),
        )

    def _with_control_edges(
        self, text: str, controls: Sequence[Control], ids: Ids, starts: Ids, ends: Ids
    ) -> tuple[Ids, Ids, Ids]:
        """Give each control token its own edges: one with `lstrip` or `rstrip` swallows white space, which moves none of its text.

        Raises:
            TokenizerError: the tokenizer writes a control token of the text as other ids.
        """
        reach = np.maximum.accumulate(ends) if len(ends) else ends
        for start, end, identity in controls:
            k = int(np.searchsorted(reach, start, side="right"))
            while k < len(ids) and starts[k] < end and ids[k] != identity:
                k += 1
            if k >= len(ids) or ids[k] != identity or starts[k] >= end:
                raise TokenizerError(
                    f"{self.tokenizer.name}: encodes the control token {text[start:end]!r} of a rendered text as other ids than its own "
                    f"({identity}), so turns would end or begin with pieces of text; mend its added_tokens (`normalized`, `single_word`)"
                )
            starts[k], ends[k] = start, end
        return ids, starts, ends

    def foreign_control_ids(self, ids: Ids, controls: Sequence[Control]) -> int:
        """How many control ids stand in `ids` beyond those written on purpose (promise 3: always none)."""
        return int(np.isin(ids, self.control_ids).sum()) - len(controls)

    def differs_from_whole(self, request: Request, ids: Ids, most: int) -> str:
        """'' when the tokenizer gives the text as a whole these ids, else the first difference (the check on a sample of a build).

        Args:
            request, ids: a text that quotes no control token, and its ids.
            most: characters after which the comparison ends, at the next control token; what stands behind one changes no id before it.
        """
        text, end = request.text, bisect.bisect_left(request.controls, (most,))
        places = np.flatnonzero(self._is_control[ids])
        if not self.whole_only and end < len(request.controls) == len(places):
            text, ids = text[: request.controls[end][0]], ids[: places[end]]
        whole = self.tokenizer.whole.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if whole == ids.tolist():
            return ""
        at = first_unequal(whole, ids.tolist())
        return f"token {at}: {whole[at : at + 4]} in the whole text, {ids[at : at + 4].tolist()} in pieces"

    def _first_difference(self, backend: hf.Tokenizer) -> str:
        """Where the whole text and its pieces under `backend` first get different ids, on texts made to show it; '' where nowhere."""
        odd = [t for t in self.tokenizer.added.values() if t.content in self.control and (t.lstrip or t.rstrip or t.single_word)]
        joined = PROBE_TEXTS + [
            f"{a}{literal}{b}" for literal in list(self.control)[:64] for a, b in (("a", "b"), (" ", " "), ("\n", "\n\n"))
        ]
        ordinary = [token for token in self.tokenizer.added.values() if token.content not in self.control]
        joined += [f"x {token.content} y" for token in [*odd, *ordinary[:64], *ordinary[-64:]]]
        for text in joined:
            whole = self.tokenizer.whole.encode(text, add_special_tokens=False).ids
            ids, _, _ = self._encode_pieces(backend, text, self.cut(text), ())
            if whole != ids.tolist():
                return f"{text!r} is {whole[:8]} as a whole and {ids.tolist()[:8]} cut at control tokens"
        return ""


def edge_at(starts: Ids, ends: Ids, border: int) -> Edge:
    """The edge at a character offset, from the offsets of all tokens (exact around it)."""
    token = int(np.searchsorted(starts, border, side="left"))
    over = 0
    while over < token and ends[token - 1 - over] > border:
        over += 1
    return Edge(token, over, not over and token < len(starts) and bool(starts[token] == border))


def spelled(tokenizer: Tokenizer) -> list[bytes] | None:
    """What each id stands for, in bytes, for byte-level and byte-fallback vocabularies; None for others.

    An entry that is no text by itself, or swallows blanks beside it, is empty.
    """
    vocabulary = tokenizer.whole.get_vocab()
    if tokenizer.data.get("model", {}).get("type") != "BPE":
        return None
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    decoder = orjson.dumps(tokenizer.data.get("decoder"))
    if b'"ByteLevel"' in decoder:
        for token, identity in vocabulary.items():
            with suppress(KeyError):  # a token of other characters is no bytes
                table[identity] = bytes([_BYTES[char] for char in token])
    elif b'"ByteFallback"' in decoder:
        for token, identity in vocabulary.items():
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            table[identity] = bytes([int(byte.group(1), 16)]) if byte else token.replace("\u2581", " ").encode()
    else:
        return None
    for added in tokenizer.added.values():
        table[added.id] = b"" if added.lstrip or added.rstrip or added.single_word else added.content.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters -> bytes: printable ones stand for themselves, the others for code points from 256 on (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{chr(byte): byte for byte in plain}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


_BYTES = _byte_alphabet()


def _between(controls: Sequence[Control], length: int) -> list[tuple[int, int]]:
    """The ranges in front of, between and behind the control tokens of a text; empty ones too."""
    starts = [0, *(end for _, end, _ in controls)]
    return list(zip(starts, [*(start for start, _, _ in controls), length], strict=True))


def _pieces_with_border(pieces: Sequence[tuple[int, int]], borders: Sequence[int]) -> set[int]:
    found = set()
    i = 0
    for border in borders:
        while i < len(pieces) and pieces[i][1] <= border:
            i += 1
        if i < len(pieces) and pieces[i][0] < border < pieces[i][1]:
            found.add(i)
    return found


# texts on which pieces and whole are compared when a tokenizer is loaded
PROBE_TEXTS = [
    "Hello world",
    " leading space",
    "trailing space ",
    "two  spaces\n\nand lines\n",
    "\n",
    "user\nWhat is 2+2?",
    "assistant\n\n  indented code:\n\tif x:\n\t\treturn 1234567\n",
    "naïve café, 日本語テスト, русский текст, مرحبا",
    "👩‍👩‍👧 and 🇩🇪 flags",
    "e\u0301 combining, \u00bd half, \ufb01 ligature",
    '{"name": "get_weather", "arguments": {"city": "Zürich"}}',
    "it's they'll I'd don't",
    "नमस्ते दुनिया, ภาษาไทย น้ำ, 한국어 문장",
    "x = [1, 2, 3]  # 12345 + 3.14e-10\r\n",
]
