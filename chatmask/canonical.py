"""One JSON text for one value: what fingerprints are made of, and how two settings are compared."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ABSENT = object()


def canonical_json(value: object) -> bytes:
    """Return the one JSON text of a value: keys sorted, no blanks, UTF-8, newline at the end.

    Raises:
        ValueError: NaN, an infinity or a lone surrogate.
        TypeError: something that JSON cannot hold.
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def readable_json(value: object) -> bytes:
    """Return the same as `canonical_json`, indented for people; also one text for one value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=2).encode() + b"\n"


def fingerprint(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say what changed between two settings, one line a value: `template.sha256: changed (1c2f.. -> 90ab..)`.

    Args:
        old: the settings before, JSON values only.
        new: the settings now.

    Returns:
        Sorted lines with dotted paths; empty if nothing changed.
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    lines = []
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if was is _ABSENT:
            lines.append(f"{path}: added ({_short(now)})")
        elif now is _ABSENT:
            lines.append(f"{path}: removed ({_short(was)})")
        elif canonical_json(was) != canonical_json(now):
            lines.append(f"{path}: changed ({_short(was)} -> {_short(now)})")
    return lines


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _short(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40,}", value):
        return f"{value[:12]}.."
    text = canonical_json(value).decode().strip()
    return text if len(text) <= 60 else f"{text[:57]}.."


def first_unequal(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The first index at which two sequences differ; the length of the shorter one where it begins the other."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] and b[:low] are equal; comparing slices is much faster than comparing one by one
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def first_difference(served: str, trained: str) -> str:
    """The first place where two texts differ, both shown."""
    at = first_unequal(served, trained)
    start = max(0, at - 20)
    return f"at character {at}: served {served[start : at + 40]!r}, trained on {trained[start : at + 40]!r}"
