"""The fast tokenizer, and the proof that it gives the ids of the `tokenizers` library.

`fastokens` (Apache-2.0, a wheel for each common platform, no dependencies) encodes about a hundred times faster. It is the extra
`chatmask[fast]`, and only ever a shortcut: when it is loaded it must agree with `tokenizers` on texts made to show a difference, and a
build goes on comparing samples of what it encodes (`Encoder.agrees`). Without it, or after a difference, `tokenizers` does all the
work, on pieces between control tokens, each distinct piece once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import orjson
import tokenizers as hf

Ids = np.ndarray[Any, np.dtype[np.int32]]
Offsets = np.ndarray[Any, np.dtype[np.int64]]

CACHE_BYTES = 64 << 20  # of pieces that the `tokenizers` library need not encode again
PROOF_STRINGS = 600


class Fast:
    """`fastokens` on a tokenizer's own `tokenizer.json`.

    Args:
        data: the parsed `tokenizer.json`.

    Raises:
        ImportError: it is not installed.
        ValueError: it does not load this tokenizer.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        import fastokens

        self.name = f"fastokens {version('fastokens')}"
        data = {**data, "truncation": None, "padding": None, "post_processor": None}
        try:
            self._tokenizer = fastokens.Tokenizer.from_json_str(orjson.dumps(data).decode())
        except BaseException as error:  # a panic of the native code is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(f"{self.name}: {error}") from None

    def flat(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Ids of all texts in a row, int32 `[tokens]`, and int64 `[texts + 1]` offsets into them. Added tokens become their ids."""
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts))
        return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)


class Pieces:
    """The `tokenizers` library on many pieces of text, each distinct one once.

    Its offset-free batch call on small pieces is its fastest way, and pieces repeat where samples share a context.
    """

    def __init__(self, tokenizer: hf.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, Ids] = {}
        self._bytes = 0

    def encode(self, pieces: Sequence[str]) -> list[Ids]:
        """The ids of each piece, int32 `[tokens]`."""
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in self._known]
        if self._bytes > CACHE_BYTES:
            self._known = {piece: self._known[piece] for piece in set(pieces) if piece in self._known}
            self._bytes = sum(map(len, self._known))
        for piece, encoding in zip(missing, self.tokenizer.encode_batch_fast(missing, add_special_tokens=False), strict=True):
            self._known[piece] = np.asarray(encoding.ids, np.int32)
            self._bytes += len(piece)
        return [self._known[piece] for piece in pieces]


def installed() -> str | None:
    """Name and version of the fast tokenizer, or None where it is not installed."""
    try:
        return f"fastokens {version('fastokens')}"
    except PackageNotFoundError:
        return None


def proof_texts(added: Sequence[str]) -> list[str]:
    """Texts on which tokenizers have been seen to differ: odd characters, runs of blanks, all kinds of digits, added tokens in company.

    Args:
        added: contents of the tokenizer's added tokens.
    """
    texts = [*_HARD, *(before + token + behind for token in added for before, behind in (("", ""), (" a", "b "), ("\n", "\n\n")))]
    source = random.Random(0)  # noqa: S311  (the same texts every time)
    alphabet = [*_CHARACTERS, *added[:64]]
    texts += ["".join(source.choices(alphabet, k=source.randrange(1, 40))) for _ in range(PROOF_STRINGS)]
    texts += ["".join(chr(_code_point(source)) for _ in range(source.randrange(1, 40))) for _ in range(PROOF_STRINGS)]
    return texts


def _code_point(source: random.Random) -> int:
    while True:
        point = source.choice(
            [source.randrange(0x250), source.randrange(0x3000), source.randrange(0x10000), source.randrange(0x20000)]
        )
        if not 0xD800 <= point < 0xE000:
            return point


_CHARACTERS = [
    *"aZ09 ._-'\"\\/<>|{}[]()#*",
    *(" ", "  ", "    ", "\n", "\n\n", "\n    \n", "\t", "\r\n", "\r", "\x0b", "\x00", "\x1b[31m", "\x7f", "\x85", "\xa0"),
    *("é", "e\u0301", "ñ", "n\u0303", "ﬁ", "½", "²", "Ⅷ", "٣", "०", "𝟘", "ß", "İ", "ı", "ς", "Ω"),
    *("日本", "語。", "한국", "ไทย", "हि", "న్", "مر", "עב", "\u200b", "\u200d", "\u2028", "\u3000", "\ufeff", "\ufffd", "\ue000"),
    *(
        "👩\u200d👩\u200d👧",
        "🇩🇪",
        "👍🏽",
        "\u0301",
        "\u0e33",
        "▁",
        "Ġ",
        "Ċ",
        "<0x0A>",
        "'s",
        "'LL",
        "’t",
        "123",
        "1,234.5",
        "0x1F",
    ),
]
_HARD = [
    *("".join(pair) for pair in itertools.product(_CHARACTERS, _CHARACTERS)),
    "def f(x):\n    if x:\n\n\n        return 1234567\n\t\t# half ½ \r\n\r\n",
    "a" * 3000,
    " " * 3000,
    "\n" * 3000,
    "🙂" * 500,
    "9" * 1000,
]
