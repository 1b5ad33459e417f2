"""Rows to Arrow shards and back: fixed schema, equal bytes for equal rows, and the checks that find a damaged shard.

A shard is one Arrow IPC *stream* (the form that `datasets.load_from_disk` reads). Arrow has no checksum, and a stream that is
cut between two record batches opens short without an error; so each shard has a `ShardInfo` in the manifest, and
`check_shard` compares the two.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from .arrow import SCHEMA, Columns, batch_of, first_fault
from .errors import CheckFailed, DamagedDataset
from .example import Row
from .storage import Storage

# A record batch ends at whichever comes first: 512 rows, or the row that reaches a Mi token (5 bytes a token on disk). The rule
# reads nothing but the rows, so equal rows give equal bytes.
BATCH_ROWS = 512
BATCH_TOKENS = 1 << 20

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
SHARD_NAME = re.compile(r"data-\d{5,}-of-\d{5,}\.arrow")


def shard_name(index: int, count: int) -> str:
    """Return the file name of shard `index` (from 0) of `count`."""
    return f"data-{index:05d}-of-{count:05d}.arrow"


@dataclass(frozen=True)
class ShardInfo:
    """What the manifest says of one shard.

    Attributes:
        file: bare file name.
        rows: number of rows.
        tokens: length of all `input_ids` together.
        supervised_tokens: number of ones in all `loss_mask`s together.
        bytes: size of the file.
        sha256: of the file, in hex.
    """

    file: str
    rows: int
    tokens: int
    supervised_tokens: int
    bytes: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they stand in a manifest or a receipt."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: object) -> ShardInfo:
        """Read what `to_dict` gave.

        Raises:
            ValueError: a field is missing, unknown, or of another type.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or sorted(map(str, value)) != sorted(names):
            raise ValueError(f"a shard entry must have exactly the fields {', '.join(names)}; found {value!r:.200}")
        for name in names:
            expected = str if name in ("file", "sha256") else int
            if type(value[name]) is not expected or (expected is int and value[name] < 0):
                raise ValueError(f"shard field {name}: expected {expected.__name__}, found {value[name]!r:.80}")
        return cls(**value)


class ShardWriter:
    """Writes one shard under a temporary name, and gives it its own name when it is whole and on the disk.

    A record batch is hashed and written in a thread of its own while the next one is made; what that meets is raised by the next
    `add`, or by `close`.

    Use it as a context manager: `info` holds the `ShardInfo` after the block; on an exception the file is removed.

    Args:
        storage: where all output goes through.
        path: the shard's file in the staging folder.
    """

    def __init__(self, storage: Storage, path: Path) -> None:
        self._storage = storage
        self._path = path
        # The process id keeps a left-over worker of a killed build from writing into the same file.
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._pending: list[Row] = []
        self._pending_tokens = 0
        self._digest = hashlib.sha256()
        self._rows = self._tokens = self._supervised = self._bytes = 0
        self._info: ShardInfo | None = None
        self._thread = ThreadPoolExecutor(1, "chatmask-writer")
        self._writing: Future[None] | None = None
        self._fd: int | None = storage.open(self._temporary)
        try:
            self._write(SCHEMA.serialize())
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    def info(self) -> ShardInfo:
        """The finished shard; only after `close`."""
        if self._info is None:
            raise CheckFailed(f"{self._path}: the shard is not closed yet")
        return self._info

    def add(self, row: Row) -> None:
        """Add one row.

        Raises:
            CheckFailed: the row's arrays have the wrong type or shape, or (when its record batch is written) a row breaks
                one of the rules of `first_fault`.
            StorageError: the disk refuses.
        """
        ids, mask = row.input_ids, row.loss_mask
        if ids.dtype != np.int32 or mask.dtype != np.uint8 or ids.ndim != 1 or ids.shape != mask.shape:
            raise CheckFailed(
                f"{row.file}:{row.line}: a row needs int32 input_ids and uint8 loss_mask of one length; "
                f"found {ids.dtype}{list(ids.shape)} and {mask.dtype}{list(mask.shape)}"
            )
        self._pending.append(row)
        self._pending_tokens += len(ids)
        if len(self._pending) >= BATCH_ROWS or self._pending_tokens >= BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        batch = batch_of(self._pending)
        fault = first_fault(batch)
        if fault is not None:
            raise CheckFailed(f"{self._path.name}: refused to write {fault}")
        self._rows += len(self._pending)
        self._tokens += self._pending_tokens
        self._supervised += sum(int(np.count_nonzero(row.loss_mask)) for row in self._pending)
        self._pending, self._pending_tokens = [], 0
        self._write(batch.serialize())

    def _write(self, data: pa.Buffer | bytes) -> None:
        assert self._fd is not None, "the shard is closed"
        self._written()
        view = memoryview(data)
        self._bytes += view.nbytes
        self._writing = self._thread.submit(self._put, self._fd, view)

    def _put(self, fd: int, view: memoryview) -> None:
        self._storage.write(fd, view, self._temporary)
        self._digest.update(view)

    def _written(self) -> None:
        """Wait for what is being written; raises what that met."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> ShardInfo:
        """Write what is left, sync, give the shard its name and return its `ShardInfo`."""
        if self._info is not None:
            return self._info
        try:
            if self._pending or not self._rows:
                # A shard without rows gets one empty batch: some readers refuse a stream that holds none.
                self._flush()
            self._write(_END_OF_STREAM)
            self._written()
            self._thread.shutdown()
            assert self._fd is not None
            self._storage.fsync(self._fd, self._temporary)
            fd, self._fd = self._fd, None
            self._storage.close(fd, self._temporary)
            self._storage.replace(self._temporary, self._path)
        except BaseException:
            self.abort()
            raise
        self._storage.fsync_dir(self._path.parent)
        counts = (self._rows, self._tokens, self._supervised, self._bytes)
        self._info = ShardInfo(self._path.name, *counts, self._digest.hexdigest())
        return self._info

    def abort(self) -> None:
        """Close and remove the unfinished file."""
        self._writing = None
        self._thread.shutdown()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._storage.close(fd, self._temporary)
        self._storage.unlink(self._temporary)


def regular_size(path: Path) -> int:
    """Return the size of a regular file without opening it.

    Raises:
        DamagedDataset: it is missing, or a link, a pipe, a device or a directory.
    """
    try:
        status = os.lstat(path)
    except (OSError, ValueError) as error:
        raise DamagedDataset(f"{path}: the manifest names this file, but it cannot be found ({error}); build again") from None
    if not stat.S_ISREG(status.st_mode):
        raise DamagedDataset(f"{path}: not a regular file (mode {stat.filemode(status.st_mode)}); build again")
    return status.st_size


def check_file(path: Path, size: int, sha256: str | None) -> None:
    """Compare one file with what the manifest says of it; `sha256` None compares only the size.

    Raises:
        DamagedDataset: with the path, and what was expected and found.
    """
    found = regular_size(path)
    if found != size:
        raise DamagedDataset(f"{path}: {found} bytes, but the manifest says {size}; the file was cut or changed: build again")
    if sha256 is None:
        return
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise DamagedDataset(
            f"{path}: its SHA-256 is {digest}, but the manifest says {sha256}; the file was changed: build again"
        )


def read_shard(path: Path) -> pa.Table:
    """Memory-map one shard; no token is read or copied yet.

    Raises:
        DamagedDataset: it is no Arrow stream of chatmask's schema.
    """
    regular_size(path)
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DamagedDataset(f"{path}: not a readable Arrow stream ({error}); build again") from error
    if not table.schema.equals(SCHEMA, check_metadata=True):
        raise DamagedDataset(f"{path}: the columns are not chatmask's: {table.schema.to_string()[:400]}")
    return table


def check_shard(path: Path, info: ShardInfo, full: bool) -> None:
    """Compare a shard with its entry in the manifest.

    Args:
        path: the file.
        info: what the manifest says of it.
        full: also validate every Arrow buffer, and every row against the rules of `first_fault`.

    Raises:
        DamagedDataset: with the path, what was expected and what was found.
    """
    check_file(path, info.bytes, info.sha256)
    table = read_shard(path)
    if table.num_rows != info.rows:
        raise DamagedDataset(f"{path}: {table.num_rows} rows, but the manifest says {info.rows}; build again")
    if not full:
        return
    tokens = supervised = 0
    try:
        table.validate(full=True)
        for batch in table.to_batches():
            _check_nulls(path, batch)
            fault = first_fault(batch)
            if fault is not None:
                raise DamagedDataset(f"{path}: {fault}; build again")
            columns = Columns.of(batch)
            tokens += len(columns.ids)
            supervised += int(np.count_nonzero(columns.mask))
    except pa.ArrowException as error:
        raise DamagedDataset(f"{path}: the Arrow data is not valid ({error}); build again") from error
    if (tokens, supervised) != (info.tokens, info.supervised_tokens):
        raise DamagedDataset(
            f"{path}: {tokens} tokens and {supervised} supervised, "
            f"but the manifest says {info.tokens} and {info.supervised_tokens}; build again"
        )


def _check_nulls(path: Path, batch: pa.RecordBatch) -> None:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        parts: list[Any] = [column]
        while parts:
            part = parts.pop()
            if part.null_count:
                raise DamagedDataset(f"{path}: column {name} holds {part.null_count} nulls; build again")
            if pa.types.is_struct(part.type):
                parts.extend(part.field(index) for index in range(part.type.num_fields))
            elif pa.types.is_list(part.type) or pa.types.is_large_list(part.type):
                parts.append(part.values)
