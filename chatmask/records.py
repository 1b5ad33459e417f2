"""Input files as bytes: what they hold, how they are cut into work, and the strict reading of one line of JSON.

`plan` passes over each file once and cuts it into `Chunk`s of whole lines; `read` yields the lines of a chunk as `Record`s;
`parse` turns a record into a dict, or says by name why it cannot. Lines end at a newline byte and nowhere else, so U+2028
inside a string is text. User JSON is never handed to a reader that infers a schema, since that invents keys.

Kinds of input: JSON lines (any name), the same as gzip or zstd (told by the first bytes, not by the name); documents, which
are one record each: `.traj` and `.traj.json` of SWE-agent and mini-swe-agent, and a `.json` that holds one object over many
lines; and tables, of which each row is a record: Parquet files and dataset directories (see `columns`).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, cast

import orjson

from chatmask import columns
from chatmask.errors import InputError, RejectedRow, RejectReason

CHUNK_BYTES = 32 * 1024 * 1024
MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 64
OVERSIZE_KEPT = 1024

_BLOCK = 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"
_FOREIGN = {
    b"PAR1": "compressed Parquet",
    b"ARROW1\0": "Arrow",
    b"SQLite format 3\0": "SQLite",
    b"PK\x03\x04": "zip",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\0": "xz",
}


class Record(NamedTuple):
    """One line (or one document) as it stands in a file, or one row of a table as JSON.

    Attributes:
        path: the file (or directory), as it was given.
        line: number of the line or row, from 1.
        offset: where `raw` begins in the decompressed stream, in bytes (so after a BOM, if the file begins with one); of a row 0.
        raw: the bytes without line end; of an oversize line only the first 1,024.
        oversize: whether the line was longer than allowed, and `raw` was cut.
    """

    path: str
    line: int
    offset: int
    raw: bytes
    oversize: bool = False

    @property
    def blank(self) -> bool:
        """Whether the line holds nothing but white space."""
        return not self.oversize and (not self.raw or self.raw.isspace())


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous range of whole lines of one file, or of rows of one table: the work for one shard.

    Attributes:
        index: position in the plan, from 0, over all files.
        path: the file (or directory), as it was given.
        offset: where the chunk begins in the decompressed stream, in bytes; of a table 0.
        line: number of its first line or row, from 1.
        bytes: length in the decompressed stream; of rows an estimate from the size of their row groups or record batches.
        lines: how many records `read` yields, blank ones included.
        document: whether the chunk is one whole file that is one record (then `lines` is 1).
        table: of rows, how many the whole table has; else None.
    """

    index: int
    path: str
    offset: int
    line: int
    bytes: int
    lines: int
    document: bool = False
    table: int | None = None


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input as it lies on disk: its path as given, its size in bytes and its SHA-256, both before decompression.

    Of a dataset directory the size is that of its files together, and the hash is over one line `SHA-256  name` for each of
    them: `state.json`, `dataset_info.json` and the data files in their order.
    """

    path: str
    bytes: int
    sha256: str


# --- planning ---------------------------------------------------------------------------------------------------------


def plan(paths: Sequence[str | Path], chunk_bytes: int = CHUNK_BYTES) -> tuple[list[InputFile], list[Chunk]]:
    """Read every file once; give its hash and the chunks that it is cut into.

    A chunk ends after the first newline at or past each multiple of `chunk_bytes`, counted in the decompressed file, so the
    plan depends on the bytes of the inputs only. An empty file has no chunk. A table is cut at row groups or record batches; one
    that alone is longer than `chunk_bytes` is cut into even pieces.

    Args:
        paths: files and dataset directories, in the order in which their rows shall stand.
        chunk_bytes: wanted length of a chunk, in decompressed bytes.

    Raises:
        InputError: a path is missing, given twice, no regular file, damaged, of a format that is not read, or a table with a
            column that has no JSON form.
        ValueError: `chunk_bytes` is not positive.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be at least 1")
    files: list[InputFile] = []
    chunks: list[Chunk] = []
    seen: dict[str, str] = {}
    for path in paths:
        name = _checked_path(path)
        real = os.path.realpath(name)
        if real in seen:
            raise InputError(f"{name}: is the same file as {seen[real]}; give each input once")
        seen[real] = name
        if columns.is_table(name):
            file, own = _scan_table(name, chunk_bytes, len(chunks))
            files.append(file)
            chunks.extend(own)
            continue
        document = _is_trajectory(name) or (name.endswith((".json", ".json.gz", ".json.zst")) and _is_document(name))
        file, own = _scan(name, chunk_bytes, document, len(chunks))
        files.append(file)
        chunks.extend(own)
    return files, chunks


def size_of(path: str | Path) -> int:
    """Bytes on disk of an input, of a dataset directory those of its files together; 0 where there is nothing that `plan` reads.

    Raises:
        InputError: a dataset directory that does not say of which files it consists.
    """
    name = os.fspath(path).replace(os.sep, "/")
    found = columns.parts(name) if os.path.isdir(name) and columns.is_dataset(name) else [name]
    return sum(os.stat(part).st_size for part in found if os.path.isfile(part))


def _scan(name: str, chunk_bytes: int, document: bool, index: int) -> tuple[InputFile, list[Chunk]]:
    """One pass over one file: hash, newline counts, chunk borders."""
    chunks: list[Chunk] = []
    begin = position = lines = 0
    first_line, target, last = 1, chunk_bytes, b""

    def cut(end: int) -> None:
        nonlocal begin, first_line, lines
        chunks.append(Chunk(index + len(chunks), name, begin, first_line, end - begin, lines, document))
        begin, first_line, lines = end, first_line + lines, 0

    with _translated(name), open(name, "rb") as file:
        hashed = _Hashing(file)
        with _decompressed(name, hashed) as stream:
            while block := stream.read(_BLOCK):
                if position == 0:
                    _refuse_foreign(name, block)
                start = 0
                while not document and target < position + len(block):
                    newline = block.find(b"\n", max(target - position, 0))
                    if newline < 0:
                        break
                    lines += block.count(b"\n", start, newline + 1)
                    start = newline + 1
                    cut(position + start)
                    target = ((position + newline) // chunk_bytes + 1) * chunk_bytes
                lines += block.count(b"\n", start)
                position += len(block)
                last = block[-1:]
        hashed.drain()
    if position > begin:
        lines = 1 if document else lines + (last != b"\n")
        cut(position)
    return InputFile(name, hashed.count, hashed.sha256.hexdigest()), chunks


def _scan_table(name: str, chunk_bytes: int, index: int) -> tuple[InputFile, list[Chunk]]:
    """The hash of a table, and chunks of whole row groups, or of pieces of one that is too long."""
    chunks: list[Chunk] = []
    line, lines, size = 1, 0, 0

    def cut(count: int, length: int) -> None:
        nonlocal line
        chunks.append(Chunk(index + len(chunks), name, 0, line, length, count))
        line += count

    for count, length in columns.blocks(name):
        pieces = min(-(-length // chunk_bytes), count)
        if lines and (pieces > 1 or size + length > chunk_bytes):
            cut(lines, size)
            lines = size = 0
        for piece in range(1, pieces):
            # even pieces, the last of which waits for what follows
            cut(count * piece // pieces - count * (piece - 1) // pieces, length // pieces)
        lines += count - (count * (pieces - 1) // pieces if pieces else 0)
        size += length // max(pieces, 1)
    if lines:
        cut(lines, size)
    total = line - 1
    return _table_file(name), [replace(chunk, table=total) for chunk in chunks]


def _table_file(name: str) -> InputFile:
    """The identity of a table: the file's own, or one made from the files of a directory."""
    found: list[tuple[str, int, str]] = []
    for part in columns.parts(name):
        try:
            with open(part, "rb") as file:
                hashed = _Hashing(file)
                hashed.drain()
        except OSError as error:
            raise InputError(f"{part}: cannot be read ({error.strerror or error}); save the dataset again") from error
        found.append((part.removeprefix(f"{name}/"), hashed.count, hashed.sha256.hexdigest()))
    if not os.path.isdir(name):
        return InputFile(name, found[0][1], found[0][2])
    listing = "".join(f"{digest}  {part}\n" for part, _, digest in found)
    return InputFile(name, sum(size for _, size, _ in found), hashlib.sha256(listing.encode()).hexdigest())


def _checked_path(path: str | Path) -> str:
    """The path as given, with forward slashes; InputError if it is neither a regular file nor a dataset directory."""
    name = os.fspath(path).replace(os.sep, "/")
    try:
        name.encode("utf-8")
        mode = os.stat(name).st_mode
    except UnicodeEncodeError:
        raise InputError(f"{name!r}: the file name is not UTF-8; rename it") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be opened ({error.strerror or error}); check the path") from error
    if stat.S_ISDIR(mode):
        if columns.is_dataset(name):
            return name
        raise InputError(f"{name}: is a directory; give the files in it, such as {name.rstrip('/')}/*.jsonl")
    if not stat.S_ISREG(mode):
        raise InputError(f"{name}: is not a regular file; write its content to a .jsonl file first (inputs are read twice)")
    return name


def _is_trajectory(name: str) -> bool:
    return name.removesuffix(".gz").removesuffix(".zst").endswith((".traj", ".traj.json"))


def _is_document(name: str) -> bool:
    """Whether a `.json` file is one object over many lines (True) or JSON lines (False); a list is refused."""
    with _translated(name), open(name, "rb") as file, _decompressed(name, file) as stream:
        first = stream.readline(_BLOCK).removeprefix(_BOM)
        while first and not first.strip():
            first = stream.readline(_BLOCK)
        try:
            is_list = isinstance(orjson.loads(first), list)
        except orjson.JSONDecodeError:
            is_list = None
        if is_list is False:
            return False
        whole = first + stream.read(MAX_LINE_BYTES)
        more = bool(stream.read(1))
    if more:
        if first.strip() not in (b"[", b"{"):
            return False
        raise InputError(f"{name}: one JSON document of more than {MAX_LINE_BYTES:,} bytes; convert it to JSON lines")
    try:
        value = json.loads(whole)
    except (ValueError, RecursionError):
        return False
    if isinstance(value, list):
        base = name.removesuffix(".gz").removesuffix(".zst")
        raise InputError(
            f"{name}: holds one JSON list, not one object a line; convert it, for example with: jq -c '.[]' {base} > {base}l"
        )
    return isinstance(value, dict) and is_list is None


def _refuse_foreign(name: str, head: bytes) -> None:
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise InputError(f"{name}: looks like {what}, which is not read; give JSON lines (.jsonl) or plain Parquet")
    plain = name.removesuffix(".gz").removesuffix(".zst")
    if b"\0" in head[:4096] and not plain.endswith((".jsonl", ".json", ".ndjson", ".traj")):
        raise InputError(f"{name}: is a binary file of unknown kind; give JSON lines as .jsonl, .jsonl.gz or .jsonl.zst")


# --- bytes ------------------------------------------------------------------------------------------------------------


class _Hashing(io.RawIOBase):
    """Hashes and counts what is read through it, so that one pass gives both the content and the identity of a file."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.sha256 = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        data = self._file.read(-1 if size is None else size)
        self.sha256.update(data)
        self.count += len(data)
        return data

    def drain(self) -> None:
        """Read what a decompressor left unread."""
        while data := self._file.read(_BLOCK):
            self.sha256.update(data)
            self.count += len(data)

    def close(self) -> None:
        """Leave the file open: a decompressor closes what it reads, and the rest is still to be hashed."""


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Turn what the decompressors raise on damage into an InputError that names the file."""
    try:
        yield
    except InputError:
        raise
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise InputError(f"{name}: cannot be read to its end ({error}); the file is cut or damaged, fetch it again") from error


def _compression(name: str) -> str | None:
    with open(name, "rb") as file:
        head = file.read(4)
    if head.startswith(_GZIP):
        return "gzip"
    if head == _ZSTD or (head[1:] == _ZSTD_SKIPPABLE and head[0] >> 4 == 5):
        return "zstd"
    if name.endswith((".gz", ".zst")):
        raise InputError(f"{name}: does not begin as a compressed file; it is cut, or plain text under a wrong suffix")
    return None


@contextmanager
def _decompressed(name: str, file: BinaryIO | _Hashing) -> Iterator[BinaryIO | _Hashing | io.BufferedReader]:
    """The content of an open file as a stream of decompressed bytes, closed at the end."""
    stream = _decompressor(name, file) or file
    try:
        yield stream
    finally:
        stream.close()


def _decompressor(name: str, file: BinaryIO | _Hashing) -> io.BufferedReader | None:
    """A buffered reader of the decompressed content, or None for a file that is not compressed."""
    kind = _compression(name)
    if kind == "gzip":
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=cast(BinaryIO, file))), _BLOCK)
    if kind == "zstd":
        # pyarrow reads on over frame borders and notices a cut last frame; the zstandard package passes over a cut in silence.
        import pyarrow as pa

        inner = pa.CompressedInputStream(pa.PythonFile(cast(io.RawIOBase, file), mode="r"), "zstd")
        return io.BufferedReader(cast(io.RawIOBase, inner), _BLOCK)
    return None


# --- reading ----------------------------------------------------------------------------------------------------------


def read(chunk: Chunk, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Record]:
    """Yield every record of a chunk in order, blank ones included; of a table, each row as JSON.

    One newline, and one carriage return before it, is taken off each line; a BOM only at the start of the file. No more than
    one line, or `max_line_bytes` of it, is held at a time.

    Args:
        chunk: from `plan`.
        max_line_bytes: a longer line is yielded with `oversize=True` and its first 1,024 bytes.

    Raises:
        InputError: the file is damaged, or is not what it was when it was planned.
        ValueError: `max_line_bytes` is less than 1,024.
    """
    if max_line_bytes < OVERSIZE_KEPT:
        raise ValueError(f"max_line_bytes is {max_line_bytes}; it must be at least {OVERSIZE_KEPT}")
    if chunk.table is not None:
        yield from _read_rows(chunk, max_line_bytes)
        return
    position, line, end = chunk.offset, chunk.line, chunk.offset + chunk.bytes
    with _translated(chunk.path), _positioned(chunk) as stream:
        while position < end:
            begin = position
            # Room for what is not content: a BOM, and two bytes of line end.
            room = max_line_bytes + 2 + (len(_BOM) if position == 0 else 0)
            raw = stream.read(min(room, end - position)) if chunk.document else stream.readline(room)
            if not raw:
                raise _changed(chunk)
            position += len(raw)
            if begin == 0 and raw.startswith(_BOM):
                begin, raw = len(_BOM), raw[len(_BOM) :]
            complete = position == end if chunk.document else raw.endswith(b"\n")
            raw = raw.removesuffix(b"\n").removesuffix(b"\r") if raw.endswith(b"\n") else raw
            oversize = len(raw) > max_line_bytes
            if oversize and not complete:
                position += _skip_rest(stream, end - position, chunk.document)
            yield Record(chunk.path, line, begin, raw[:OVERSIZE_KEPT] if oversize else raw, oversize)
            line += 1
        if position != end or line - chunk.line != chunk.lines:
            raise _changed(chunk)


def _read_rows(chunk: Chunk, max_line_bytes: int) -> Iterator[Record]:
    if sum(count for count, _ in columns.blocks(chunk.path)) != chunk.table:
        raise _changed(chunk)
    for line, raw in enumerate(columns.rows(chunk.path, chunk.line - 1, chunk.lines), chunk.line):
        oversize = len(raw) > max_line_bytes
        yield Record(chunk.path, line, 0, raw[:OVERSIZE_KEPT] if oversize else raw, oversize)


def _skip_rest(stream: BinaryIO | io.BufferedReader, limit: int, document: bool) -> int:
    """Pass over the rest of a line, or of a document of `limit` bytes more; the number of bytes passed."""
    skipped = 0
    while piece := stream.read(min(_BLOCK, limit - skipped)) if document else stream.readline(_BLOCK):
        skipped += len(piece)
        if not document and piece.endswith(b"\n"):
            break
    return skipped


def _changed(chunk: Chunk) -> InputError:
    return InputError(f"{chunk.path}: changed since it was planned (chunk {chunk.index}, line {chunk.line}); build again")


# A compressed file cannot be entered in its middle. The decompressor of the chunk read last waits here, so that a process
# that takes chunks in rising order decompresses each file once, not once a chunk. The process id keeps a forked child off it.
_Identity = tuple[int, int, int, int]
_waiting: dict[str, tuple[_Identity, int, io.BufferedReader, BinaryIO]] = {}


@contextmanager
def _positioned(chunk: Chunk) -> Iterator[BinaryIO | io.BufferedReader]:
    """A stream that stands at the beginning of the chunk."""
    file: BinaryIO = open(chunk.path, "rb", buffering=_BLOCK)  # noqa: SIM115 - a waiting decompressor outlives this function
    decompressor: io.BufferedReader | None = None
    keep = False
    try:
        status = os.fstat(file.fileno())
        identity = (os.getpid(), status.st_ino, status.st_size, status.st_mtime_ns)
        position = 0
        if chunk.path in _waiting:
            whose, place, waiting, waiting_file = _waiting.pop(chunk.path)
            if whose == identity and place <= chunk.offset:
                file.close()
                position, decompressor, file = place, waiting, waiting_file
            elif whose[0] == identity[0]:
                waiting.close()
                waiting_file.close()
        decompressor = decompressor or _decompressor(chunk.path, file)
        if decompressor is None:
            file.seek(chunk.offset)
            yield file
            return
        while position < chunk.offset:
            skipped = decompressor.read(min(_BLOCK, chunk.offset - position))
            if not skipped:
                raise _changed(chunk)
            position += len(skipped)
        yield decompressor
        keep = bool(decompressor.peek(1))
        if keep:
            _forget_waiting()
            _waiting[chunk.path] = (identity, chunk.offset + chunk.bytes, decompressor, file)
    finally:
        if not keep:
            if decompressor is not None:
                decompressor.close()
            file.close()


def _forget_waiting() -> None:
    """Close what waits, unless it was inherited from a parent process."""
    while _waiting:
        identity, _, stream, file = _waiting.popitem()[1]
        if identity[0] == os.getpid():
            stream.close()
            file.close()


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse(record: Record, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The JSON object of a record, read strictly.

    Numbers keep their value (integers of any length up to Python's 4,300 digits are exact), strings every character.

    Args:
        record: from `read`.
        max_depth: deepest nesting allowed; the outer object is level 1.

    Raises:
        RejectedRow: LINE_TOO_LONG, INVALID_UTF8, INVALID_JSON, LONE_SURROGATE, DUPLICATE_KEY, NOT_FINITE, TOO_DEEP or
            NOT_AN_OBJECT.
    """
    if record.oversize:
        raise RejectedRow(RejectReason.LINE_TOO_LONG, "the line is longer than the limit")
    value = loads(record.raw, max_depth)
    if not isinstance(value, dict):
        raise RejectedRow(RejectReason.NOT_AN_OBJECT, f"found a JSON {_kind(value)}")
    return value


def loads(raw: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Read one JSON value with the rules of `parse` (any value is allowed on top)."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _loads_exactly(raw, max_depth)
    if b"\\u0022" in raw:
        return _loads_exactly(raw, max_depth)
    quotes, rounded = _survey(value, max_depth)
    # Each string token has two quotes, and each quote inside it stands there as \", so the sum over the parsed strings falls
    # short of the quotes of the line exactly if a repeated key was lost (or a quote was written as \u0022, see above).
    if rounded or quotes != raw.count(b'"'):
        return _loads_exactly(raw, max_depth)
    return value


def _survey(value: Any, max_depth: int) -> tuple[int, bool]:
    """How many quotes the strings of a value take in JSON, and whether a float may be an integer that orjson rounded."""
    strings: list[str] = [value] if isinstance(value, str) else []
    rounded = isinstance(value, float)
    level: list[Any] = [value] if isinstance(value, (dict, list)) else []
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise RejectedRow(RejectReason.TOO_DEEP, f"nested deeper than {max_depth} levels")
        below: list[Any] = []
        for node in level:
            if type(node) is dict:
                strings += node
                node = node.values()
            for child in node:
                kind = type(child)
                if kind is str:
                    strings.append(child)
                elif kind is dict or kind is list:
                    below.append(child)
                elif kind is float and abs(child) >= 2.0**63:
                    rounded = True
        level = below
    return 2 * len(strings) + "".join(strings).count('"'), rounded


def _loads_exactly(raw: bytes, max_depth: int) -> Any:
    """The slow reading with the standard library: finds the reason of a failure, repeated keys and long integers."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in raw[:2]:
        raise RejectedRow(RejectReason.INVALID_JSON, "the line looks like UTF-16 or UTF-32; save the file as UTF-8")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} of the line is 0x{raw[error.start]:02x} ({error.reason})"
        raise RejectedRow(RejectReason.INVALID_UTF8, detail) from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite)
    except RecursionError:
        raise RejectedRow(RejectReason.TOO_DEEP, f"nested deeper than {max_depth} levels") from None
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at character {error.pos} of {len(text)}"
        raise RejectedRow(RejectReason.INVALID_JSON, detail) from None
    except RejectedRow:
        raise
    except ValueError as error:
        raise RejectedRow(RejectReason.INVALID_JSON, f"a number cannot be read: {error}") from None
    _survey(value, max_depth)
    if "\\u" in text:
        _refuse_lone_surrogates(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RejectedRow(RejectReason.DUPLICATE_KEY, f"the key {repeated[:60]!r} stands twice in one object")
    return value


def _not_finite(text: str) -> NoReturn:
    raise RejectedRow(RejectReason.NOT_FINITE, f"found {text}")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        _not_finite(text[:60])
    return value


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        found = ord(error.object[error.start])
        raise RejectedRow(RejectReason.LONE_SURROGATE, f"found \\u{found:04x} without its other half") from None


def _kind(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]
