"""Control tokens and encoding: text that nobody but the template made structural cannot become a control token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import tokenizers as hf

from .canonical import first_unequal
from .errors import TokenizerError
from .templates.environment import constants

if TYPE_CHECKING:
    from .tokenizers import Tokenizer

Ids = np.ndarray[Any, np.dtype[np.int32]]


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
        return [(match.start(), match.end(), self.control[match.group()]) for match in self.pattern.finditer(text)]

    def encode(self, text: str, controls: Sequence[tuple[int, int, int]], borders: Iterable[int] = ()) -> tuple[Ids, Ids, Ids]:
        """Encode one text.

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
        self, backend: hf.Tokenizer, text: str, controls: Sequence[tuple[int, int, int]], borders: Iterable[int]
    ) -> tuple[Ids, Ids, Ids]:
        real_ids = None if backend is self.tokenizer.whole else self._real_ids
        pieces: list[tuple[int, int]] = []
        position = 0
        for start, end, _ in controls:
            pieces.append((position, start))
            position = end
        pieces.append((position, len(text)))
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
        self, text: str, controls: Sequence[tuple[int, int, int]], ids: Ids, starts: Ids, ends: Ids
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

    def foreign_control_ids(self, ids: Ids, controls: Sequence[tuple[int, int, int]]) -> int:
        """How many control ids stand in `ids` beyond those written on purpose (promise 3: always none)."""
        return int(np.isin(ids, self.control_ids).sum()) - len(controls)

    def differs_from_whole(self, text: str, ids: Ids) -> str:
        """'' when the tokenizer gives the whole text these ids, else the first difference (the check on a sample of a build)."""
        whole = self.tokenizer.whole.encode(text, add_special_tokens=False).ids
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
