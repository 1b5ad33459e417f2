"""`shuffle: true`: the rows of all parts of a build, dealt into its shards in the order of a seeded rank.

The build writes its chunks as *parts* (`part-00000-of-00012.arrow`) in the staging folder. When all of them are there, `deal` reads
where each row comes from, orders all rows by rank, and writes as many shards as there are parts, each with its receipt. Only the
order (16 bytes a row) and the rows of one shard are in memory; the parts are memory-mapped. A shard depends on parts and seed only,
so a build that was killed goes on with the next shard, whoever made the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrow import Columns
from .errors import DamagedDataset
from .example import Row
from .manifest import find_shard, finished_shard, receipt_path, write_receipt
from .shards import ShardInfo, ShardWriter, read_shard, shard_name
from .storage import Storage, staging
from .trajectories import shuffle_rank

OPEN_PARTS = 128  # memory maps at a time; a process may hold 1,024 files by default


def part_name(index: int, count: int) -> str:
    """File name of what chunk `index` of `count` gives, where the rows are dealt into shards afterwards."""
    return shard_name(index, count).replace("data-", "part-")


def deal(storage: Storage, directory: Path, parts: Sequence[ShardInfo], run: str, seed: int) -> list[ShardInfo]:
    """Write the shards of a shuffled build, as many as there are parts, rows dealt evenly by count.

    Args:
        storage: where all output goes through; the caller holds its lock on `directory`.
        directory: the dataset directory; its staging folder holds the parts.
        parts: all parts, in the order of the input.
        run: fingerprint of this build; shards with a receipt of it are kept.
        seed: of the order.

    Returns:
        The shards, in the staging folder or where a killed commit has moved them.

    Raises:
        DamagedDataset: a part is gone or was changed.
        StorageError: the disk refuses.
    """
    names = [shard_name(index, len(parts)) for index in range(len(parts))]
    finished = [finished_shard(directory, name, run) for name in names]
    if all(finished):
        return [ShardInfo.from_dict(receipt["shard"]) for receipt in finished if receipt]
    order = _order([_path(directory, part) for part in parts], seed)

    @lru_cache(maxsize=OPEN_PARTS)
    def table(part: int) -> Any:
        return _Part(_path(directory, parts[part]))

    shards = []
    for index, (name, receipt) in enumerate(zip(names, finished, strict=True)):
        if receipt is None:
            picks = order[len(order) * index // len(names) : len(order) * (index + 1) // len(names)]
            rows: dict[tuple[int, int], Row] = {}
            for part, row in sorted((int(part), int(row)) for part, row in picks):  # a part after the other, each read forwards
                rows[part, row] = table(part).row(row)
            with ShardWriter(storage, staging(directory) / name) as writer:
                for part, row in picks:
                    writer.add(rows.pop((int(part), int(row))))
            receipt = {"fingerprint": run, "shard": writer.info.to_dict()}
            write_receipt(storage, receipt_path(directory, name), receipt)
        shards.append(ShardInfo.from_dict(receipt["shard"]))
    return shards


def _path(directory: Path, part: ShardInfo) -> Path:
    path = find_shard(directory, part)
    if path is None:
        raise DamagedDataset(f"{staging(directory) / part.file}: the finished part is gone or was changed; run the build again")
    return path


def _order(parts: Sequence[Path], seed: int) -> npt.NDArray[np.uint32]:
    """(part, row) of every row, `[rows, 2]`, by the first 8 bytes of its rank; what is equal in them stays in the input's order."""
    ranks, places = [], []
    for number, path in enumerate(parts):
        table: Any = read_shard(path)
        for source, sample in zip(table.column("source").to_pylist(), table.column("sample").to_pylist(), strict=True):
            key = f"{source['file']}:{source['line']}"
            ranks.append(np.uint64(int(shuffle_rank(seed, key, sample["variant"], sample["index"])[:16], 16)))
        places.append(np.stack([np.full(table.num_rows, number, np.uint32), np.arange(table.num_rows, dtype=np.uint32)], axis=1))
    order: npt.NDArray[np.uint32] = np.concatenate(places)[np.argsort(np.array(ranks, np.uint64), kind="stable")]
    return order


class _Part:
    """A part, memory-mapped; rows are copied out, so that a map can be closed."""

    def __init__(self, path: Path) -> None:
        self._batches = read_shard(path).to_batches()
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def row(self, index: int) -> Row:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        one = self._batches[number].slice(index - int(self._starts[number]), 1)
        columns = Columns.of(one)
        source, sample = one.column(3)[0].as_py(), one.column(4)[0].as_py()
        return Row(
            columns.ids.copy(),
            columns.mask.copy(),
            columns.spans(0),
            source["file"],
            source["line"],
            sample["index"],
            sample["variant"],
        )
