"""Rows of Parquet files and Hugging Face dataset directories as JSON objects.

An Arrow struct gives every value every key that any value has, with null where it has none. So a null inside a struct is taken
for a key that is not there: below the top level, keys whose value is null are left out (a null that was meant cannot be told
apart). Where nothing is invented, nothing is left out: columns of the row, elements of lists, entries of maps, and JSON text,
whether Arrow knows it as JSON (which is written as it stands) or only as a string (which stays a string).

The rest is JSON's: dates and times become ISO text, decimals numbers with all their digits, and NaN in a column of floats, where
it stands for a missing value, null. NaN deeper down, repeated keys of a map and text that is no UTF-8 are written such that
reading the row rejects it by name. Types without a JSON form are refused with the name of the column.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from chatmask.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

# Rows that are held at a time, as Arrow and as JSON. A long trajectory takes a megabyte.
BATCH_ROWS = 64

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


# --- what is a table --------------------------------------------------------------------------------------------------


def is_dataset(name: str) -> bool:
    """Whether a directory is a dataset as Hugging Face's `save_to_disk` writes it; InputError if it holds several splits."""
    if os.path.isfile(os.path.join(name, "dataset_dict.json")):
        splits = sorted(entry.name for entry in os.scandir(name) if entry.is_dir())
        raise InputError(f"{name}: holds several splits; give those that you want, such as {name}/{(splits or ['train'])[0]}")
    return all(os.path.isfile(os.path.join(name, part)) for part in ("state.json", "dataset_info.json"))


def is_table(name: str) -> bool:
    """Whether a path that `is_dataset` or that is a file holds rows in columns: told by the first bytes, not by the name."""
    if os.path.isdir(name):
        return True
    with open(name, "rb") as file:
        head = file.read(4)
    if head != b"PAR1" and name.endswith(".parquet"):
        raise InputError(f"{name}: does not begin as Parquet; it is cut, or another format under a wrong suffix")
    return head == b"PAR1"


def parts(name: str) -> list[str]:
    """The files of a table, by which it is identified: the file itself, or all that a dataset directory consists of."""
    if not os.path.isdir(name):
        return [name]
    return [f"{name}/state.json", f"{name}/dataset_info.json", *_data_files(name)]


def _data_files(name: str) -> list[str]:
    """The files with the rows of a dataset directory, in order."""
    try:
        with open(f"{name}/state.json", "rb") as file:
            state = json.load(file)
        names = [entry["filename"] for entry in state["_data_files"]]
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{name}/state.json: does not list data files ({error!r}); save the dataset again") from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(f"{name}: selects rows by an index of an old release; load and save the dataset again")
    if not all(isinstance(one, str) and one == os.path.basename(one) and one for one in names):
        raise InputError(f"{name}/state.json: names data files outside of the directory; save the dataset again")
    return [f"{name}/{one}" for one in names]


# --- reading ----------------------------------------------------------------------------------------------------------


def blocks(name: str) -> Iterator[tuple[int, int]]:
    """Rows and bytes in memory of each row group or record batch; InputError where a column has no JSON form."""
    with _arrow_errors(name):
        if os.path.isdir(name):
            for file in _data_files(name):
                with _stream(file) as batches:
                    _check_schema(name, batches.schema)
                    for batch in batches:
                        yield batch.num_rows, batch.get_total_buffer_size()
            return
        with _parquet(name) as parquet:
            _check_schema(name, parquet.schema_arrow)
            for index in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(index)
                yield group.num_rows, group.total_byte_size


def rows(name: str, first: int, count: int) -> Iterator[bytes]:
    """The JSON of the rows `first` (from 0) to `first + count`, or to the end of the table if that comes before."""
    with _arrow_errors(name):
        for batch in _batches(name, first, count):
            yield from _json_rows(batch, name)


def _batches(name: str, first: int, count: int) -> Iterator[pa.RecordBatch]:
    """The wanted rows, no more than `BATCH_ROWS` at a time."""
    position, end = 0, first + count
    for length, found in _files_batches(name, first, end):
        if position >= end:
            return
        for batch in found:
            begin, stop = max(first - position, 0), min(end - position, batch.num_rows)
            for at in range(begin, stop, BATCH_ROWS):
                yield batch.slice(at, min(BATCH_ROWS, stop - at))
            position += batch.num_rows
            if position >= end:
                return
        position += length


def _files_batches(name: str, first: int, end: int) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
    """Batches in order, group by group: those of a group that holds wanted rows, or the length of one that is passed over."""
    if os.path.isdir(name):
        for file in _data_files(name):
            with _stream(file) as batches:
                yield 0, iter(batches)
        return
    with _parquet(name) as parquet:
        position = 0
        for index in range(parquet.metadata.num_row_groups):
            length = parquet.metadata.row_group(index).num_rows
            if position < end and first < position + length:
                yield 0, parquet.iter_batches(BATCH_ROWS, row_groups=[index], use_threads=False)
            else:
                yield length, iter(())
            position += length


@contextmanager
def _parquet(name: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    # A buffer makes Arrow read page by page instead of whole column chunks.
    with pq.ParquetFile(name, buffer_size=1 << 20, page_checksum_verification=True) as parquet:
        yield parquet


@contextmanager
def _stream(name: str) -> Iterator[pa.RecordBatchReader]:
    import pyarrow as pa

    with open(name, "rb") as file:
        # Without its end mark a stream is read to where it stops, and nobody would notice that it was cut there.
        file.seek(-min(8, os.fstat(file.fileno()).st_size), os.SEEK_END)
        if file.read(8) != _END_OF_STREAM:
            raise InputError(f"{name}: does not end as an Arrow stream; the file is cut or damaged, save the dataset again")
    with pa.memory_map(name) as source, pa.ipc.open_stream(source) as batches:
        yield batches


@contextmanager
def _arrow_errors(name: str) -> Iterator[None]:
    """Turn what Arrow raises on damage into an InputError that names the table."""
    import pyarrow as pa

    try:
        yield
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{name}: cannot be read ({error}); the file is cut or damaged, fetch it again") from error


# --- types ------------------------------------------------------------------------------------------------------------


def _check_schema(name: str, schema: pa.Schema) -> None:
    for column in schema:
        found = _unreadable(column.type)
        if found:
            raise InputError(f"{name}: column `{column.name}` has {found}; leave it out or convert it, then give the file again")
    if repeated := _repeated(schema.names):
        raise InputError(f"{name}: has two columns `{repeated}`; rename one")


def _unreadable(kind: Any) -> str | None:
    """What in a type has no form in JSON, or None."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.JsonType):
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return _unreadable(kind.storage_type)
    if types.is_dictionary(kind):
        return _unreadable(kind.value_type)
    if types.is_struct(kind):
        if repeated := _repeated([field.name for field in kind]):
            return f"two fields `{repeated}` in one struct"
        return next((found for field in kind if (found := _unreadable(field.type))), None)
    if types.is_map(kind):
        return _unreadable(kind.item_type) if _is_text(kind.key_type) else f"a map with keys that are {kind.key_type}"
    if _is_list(kind):
        return _unreadable(kind.value_type)
    simple = (types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, _is_text, _is_moment)
    return None if any(test(kind) for test in simple) else f"values of type {kind}, which JSON does not have"


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def _is_moment(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_timestamp(kind)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json_rows(batch: pa.RecordBatch, name: str) -> Iterator[bytes]:
    keys = [orjson.dumps(key) + b":" for key in batch.schema.names]
    columns = [_encoded(column, top=True) for column in batch.columns]
    for cells in zip(*columns, strict=True):
        yield b"{" + b",".join([key + (cell or b"null") for key, cell in zip(keys, cells, strict=True)]) + b"}"


def _encoded(array: Any, top: bool = False) -> list[bytes | None]:
    """The JSON of each value of an array; None where it is null."""
    import pyarrow as pa

    types, kind = pa.types, array.type
    if isinstance(kind, pa.JsonType):
        return [None if text is None else _json_text(text) for text in array.storage.cast(pa.large_binary()).to_pylist()]
    if isinstance(kind, pa.BaseExtensionType):
        return _encoded(array.storage, top)
    if types.is_dictionary(kind):
        return _encoded(array.dictionary_decode(), top)
    if types.is_struct(kind):
        return _objects(array)
    if types.is_map(kind):
        return _maps(array)
    if _is_list(kind):
        return _lists(array)
    if _is_text(kind):
        return [None if text is None else _string(text) for text in array.cast(pa.large_binary()).to_pylist()]
    if _is_moment(kind) or types.is_decimal(kind):
        quote = '"' if _is_moment(kind) else ""
        return [None if text is None else f"{quote}{text}{quote}".encode() for text in array.cast(pa.string()).to_pylist()]
    if types.is_floating(kind):
        return [None if value is None or (top and math.isnan(value)) else _float(value) for value in array.to_pylist()]
    return [None if value is None else orjson.dumps(value) for value in array.to_pylist()]


def _objects(array: Any) -> list[bytes | None]:
    """Structs, without the keys whose value is null."""
    keys = [orjson.dumps(field.name) + b":" for field in array.type]
    columns = [_encoded(column) for column in array.flatten()]
    valid = array.is_valid().to_pylist()
    fields = zip(*columns, strict=True) if columns else iter([()] * len(array))
    return [
        b"{" + b",".join([key + cell for key, cell in zip(keys, cells, strict=True) if cell is not None]) + b"}"
        if there
        else None
        for there, cells in zip(valid, fields, strict=True)
    ]


def _maps(array: Any) -> list[bytes | None]:
    """Maps as objects, with all of their entries: here a null was given."""
    offsets = array.offsets.to_pylist()
    begin, end = offsets[0], offsets[-1]
    keys, items = (_encoded(side.slice(begin, end - begin)) for side in (array.keys, array.items))
    entries = [(key or b'""') + b":" + (item or b"null") for key, item in zip(keys, items, strict=True)]
    spans = zip(array.is_valid().to_pylist(), offsets, offsets[1:], strict=False)
    return [b"{" + b",".join(entries[a - begin : b - begin]) + b"}" if there else None for there, a, b in spans]


def _lists(array: Any) -> list[bytes | None]:
    import pyarrow.compute as pc

    elements = iter(_encoded(array.flatten()))
    lengths = pc.list_value_length(array).to_pylist()
    return [
        None if length is None else b"[" + b",".join([next(elements) or b"null" for _ in range(length)]) + b"]"
        for length in lengths
    ]


def _string(text: bytes) -> bytes:
    try:
        return orjson.dumps(text.decode("utf-8"))
    except UnicodeDecodeError:
        # The bytes as they stand, with what JSON wants escaped: reading them says which of them is no UTF-8.
        return json.dumps(text.decode("utf-8", "surrogateescape"), ensure_ascii=False).encode("utf-8", "surrogateescape")


def _json_text(text: bytes) -> bytes:
    """JSON as it was written; if it is none, the string that it is."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return _string(text)
    return text


def _float(value: float) -> bytes:
    return orjson.dumps(value) if math.isfinite(value) else json.dumps(value).encode()
