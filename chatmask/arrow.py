"""The fixed Arrow schema of a shard: rows to a record batch, a record batch to flat arrays, and the rules that each row keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .example import Row, Span


def _value(dtype: str) -> dict[str, str]:
    return {"dtype": dtype, "_type": "Value"}


FEATURES: dict[str, Any] = {
    "input_ids": {"feature": _value("int32"), "_type": "LargeList"},
    "loss_mask": {"feature": _value("uint8"), "_type": "LargeList"},
    "spans": {
        "feature": {
            "message": _value("int32"),
            "start": _value("int32"),
            "end": _value("int32"),
            "trained": _value("bool"),
            "reason": _value("string"),
        },
        "_type": "List",
    },
    "source": {"file": _value("string"), "line": _value("int64")},
    "sample": {"index": _value("int32"), "variant": _value("int32")},
}
"""The columns as Hugging Face `datasets` describes them; kept in each shard's schema so that it needs no conversion."""

_SPAN = pa.struct(
    [
        ("message", pa.int32()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("trained", pa.bool_()),
        ("reason", pa.string()),
    ]
)
_SOURCE = pa.struct([("file", pa.string()), ("line", pa.int64())])
_SAMPLE = pa.struct([("index", pa.int32()), ("variant", pa.int32())])

_FIELDS: list[Any] = [
    ("input_ids", pa.large_list(pa.int32())),
    ("loss_mask", pa.large_list(pa.uint8())),
    ("spans", pa.list_(_SPAN)),
    ("source", _SOURCE),
    ("sample", _SAMPLE),
]
SCHEMA: pa.Schema = pa.schema(_FIELDS, metadata={"huggingface": json.dumps({"info": {"features": FEATURES}})})


@dataclass(frozen=True)
class Columns:
    """A record batch as flat numpy arrays, without a copy of the tokens.

    Row *r* has the tokens `ids[offsets[r]:offsets[r + 1]]` and the spans `span_offsets[r]` to `span_offsets[r + 1]`.
    """

    offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    mask_offsets: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8]
    span_offsets: npt.NDArray[np.int64]
    message: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    reason: Any

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Columns:
        """Take a batch of the fixed schema apart."""
        offsets, ids = _flat(batch.column(0))
        mask_offsets, mask = _flat(batch.column(1))
        span_offsets, spans = _flat(batch.column(2))
        return cls(
            offsets=offsets,
            ids=_values(ids, np.int32),
            mask_offsets=mask_offsets,
            mask=_values(mask, np.uint8),
            span_offsets=span_offsets,
            message=_values(spans.field("message"), np.int32),
            start=_values(spans.field("start"), np.int32),
            end=_values(spans.field("end"), np.int32),
            trained=_truths(spans.field("trained")),
            reason=spans.field("reason"),
        )

    def spans(self, row: int) -> tuple[Span, ...]:
        """Return the spans of one row."""
        part = slice(int(self.span_offsets[row]), int(self.span_offsets[row + 1]))
        columns = (column[part].tolist() for column in (self.message, self.start, self.end, self.trained))
        return tuple(map(Span, *columns, self.reason[part].to_pylist()))


def _values(array: Any, dtype: Any) -> npt.NDArray[Any]:
    """A numpy view of a numeric Arrow array. (`to_numpy` would do the same, and import pandas.)"""
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, len(array), array.offset * np.dtype(dtype).itemsize)


def _truths(array: Any) -> npt.NDArray[np.bool_]:
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.empty(0, np.bool_)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].astype(np.bool_)


def _flat(column: Any) -> tuple[npt.NDArray[np.int64], Any]:
    offsets = _values(column.offsets, np.int64 if isinstance(column, pa.LargeListArray) else np.int32)
    return (offsets - offsets[0]).astype(np.int64), column.values[int(offsets[0]) : int(offsets[-1])]


def first_fault(batch: pa.RecordBatch) -> str | None:
    """Say which row of a batch first breaks a rule that every row keeps, or return None.

    The rules: as many mask values as ids; ids not negative; mask 0 or 1; spans inside the row, ordered and not
    overlapping; the mask is 1 exactly on the trained spans; at least one token is supervised.
    """
    columns = Columns.of(batch)
    offsets, ids, mask = columns.offsets, columns.ids, columns.mask
    lengths = np.diff(offsets)

    def fault(row: int, text: str) -> str:
        source = batch.column(3)[row].as_py()
        return f"row {row} of its record batch ({source['file']}:{source['line']}): {text}"

    def row_of(position: int) -> int:
        return int(np.searchsorted(offsets, position, side="right")) - 1

    for row in np.flatnonzero(lengths != np.diff(columns.mask_offsets))[:1]:
        return fault(row, f"{lengths[row]} input_ids, {np.diff(columns.mask_offsets)[row]} loss_mask values")
    for position in np.flatnonzero(ids < 0)[:1]:
        return fault(row_of(position), f"token id {ids[position]} is negative")
    for position in np.flatnonzero(mask > 1)[:1]:
        return fault(row_of(position), f"loss_mask holds {mask[position]}; only 0 and 1 are allowed")

    start, end = columns.start.astype(np.int64), columns.end.astype(np.int64)
    rows = np.repeat(np.arange(len(lengths)), np.diff(columns.span_offsets))
    for span in np.flatnonzero((start < 0) | (end < start) | (end > lengths[rows]))[:1]:
        return fault(int(rows[span]), f"span [{start[span]}, {end[span]}) is not inside {lengths[rows[span]]} tokens")
    for span in np.flatnonzero((start[1:] < end[:-1]) & (rows[1:] == rows[:-1]))[:1]:
        return fault(
            int(rows[span]), f"span [{start[span + 1]}, {end[span + 1]}) begins before {end[span]}, the end of the last one"
        )

    trained = columns.trained & (end > start)
    steps = np.zeros(len(ids) + 1, dtype=np.int8)
    # Non-empty spans do not overlap here, so no start and no end occurs twice.
    steps[(start + offsets[rows])[trained]] += 1
    steps[(end + offsets[rows])[trained]] -= 1
    for position in np.flatnonzero(np.cumsum(steps[:-1], dtype=np.int8) != mask)[:1]:
        row = row_of(position)
        return fault(row, f"loss_mask[{position - offsets[row]}] is {mask[position]}, which the trained spans do not say")
    supervised = np.bincount(rows[trained], minlength=len(lengths))
    for row in np.flatnonzero(supervised == 0)[:1]:
        return fault(int(row), "no token is supervised")
    return None


def _numbers(values: npt.NDArray[Any], dtype: pa.DataType) -> Any:
    """An Arrow array on a numpy array's memory. (`pa.array` would do the same, and import pandas to look whether it is one.)"""
    return pa.Array.from_buffers(dtype, len(values), [None, pa.py_buffer(cast(Any, np.ascontiguousarray(values)))])


def _bools(values: Sequence[bool]) -> Any:
    bits = np.packbits(np.array(values, np.bool_), bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits.tobytes())])


def _strings(values: Sequence[str]) -> Any:
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(values), [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(encoded))]
    )


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    """Make one record batch of fresh arrays (a slice of a larger one would give other bytes for equal rows)."""
    offsets = _numbers(np.cumsum([0, *(len(row.input_ids) for row in rows)], dtype=np.int64), pa.int64())
    spans = [span for row in rows for span in row.spans]
    message, start, end, trained, reason = zip(*spans, strict=True) if spans else ((), (), (), (), ())
    span_values: list[Any] = [
        _numbers(np.array(message, np.int32), pa.int32()),
        _numbers(np.array(start, np.int32), pa.int32()),
        _numbers(np.array(end, np.int32), pa.int32()),
        _bools(trained),
        _strings(reason),
    ]
    source: list[Any] = [
        _strings([row.file for row in rows]),
        _numbers(np.array([row.line for row in rows], np.int64), pa.int64()),
    ]
    sample: list[Any] = [
        _numbers(np.array([row.index for row in rows], np.int32), pa.int32()),
        _numbers(np.array([row.variant for row in rows], np.int32), pa.int32()),
    ]
    empty = np.empty(0)
    ids = np.concatenate([row.input_ids for row in rows] or [empty.astype(np.int32)])
    mask = np.concatenate([row.loss_mask for row in rows] or [empty.astype(np.uint8)])
    span_offsets = _numbers(np.cumsum([0, *(len(row.spans) for row in rows)], dtype=np.int32), pa.int32())
    columns: list[Any] = [
        pa.LargeListArray.from_arrays(offsets, _numbers(ids, pa.int32())),
        pa.LargeListArray.from_arrays(offsets, _numbers(mask, pa.uint8())),
        pa.ListArray.from_arrays(span_offsets, pa.StructArray.from_arrays(span_values, fields=list(_SPAN))),
        pa.StructArray.from_arrays(source, fields=list(_SOURCE)),
        pa.StructArray.from_arrays(sample, fields=list(_SAMPLE)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
