"""Rows, shards and small datasets for the tests of what comes after the masks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chatmask.example import Row, Span
from chatmask.manifest import commit
from chatmask.shards import ShardInfo, ShardWriter, shard_name
from chatmask.storage import Storage, staging

MANIFEST: dict[str, Any] = {
    "tokenizer": {"sha256": "a" * 64, "demo": False},
    "template": {"sha256": "b" * 64},
    "options": {"split": "trajectory"},
}
REJECTS = [b'{"line":3}\n', b'{"line":9}\n']


def make_row(spans: Sequence[tuple[int, bool]], seed: int = 0, line: int = 1) -> Row:
    """Make a row of adjacent spans, each given as (length, trained)."""
    length = sum(size for size, _ in spans)
    ids = np.random.default_rng(seed).integers(0, 150_000, length, dtype=np.int32)
    mask, table, start = np.zeros(length, dtype=np.uint8), [], 0
    for message, (size, trained) in enumerate(spans):
        mask[start : start + size] = trained
        table.append(Span(message, start, start + size, trained, "" if trained else "not_last"))
        start += size
    return Row(ids, mask, tuple(table), "chats.jsonl", line, 0, 0)


def make_rows(count: int, seed: int = 0) -> list[Row]:
    """Make `count` random rows with at least one supervised token each."""
    rng = random.Random(seed)
    rows = []
    for line in range(1, count + 1):
        spans = [(rng.randint(0, 9), rng.random() < 0.5) for _ in range(rng.randint(0, 5))]
        rows.append(make_row([*spans, (rng.randint(1, 9), True)], line, line))
    return rows


def stage(storage: Storage, directory: Path, shards: Sequence[Sequence[Row]]) -> list[ShardInfo]:
    """Write shards into the staging folder, as a build does before its commit."""
    if not directory.exists():
        storage.mkdir(directory)
    storage.mkdir(staging(directory))
    infos = []
    for index, rows in enumerate(shards):
        with ShardWriter(storage, staging(directory) / shard_name(index, len(shards))) as writer:
            for row in rows:
                writer.add(row)
        infos.append(writer.info)
    return infos


def make_dataset(directory: Path, shards: Sequence[Sequence[Row]], **manifest: Any) -> dict[str, Any]:
    """Build a whole dataset and return its manifest."""
    storage = Storage()
    return commit(storage, directory, stage(storage, directory, shards), {**MANIFEST, **manifest}, REJECTS)


def tree(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory with its bytes."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
