"""A finished dataset, opened for training: refused if it is not whole, memory-mapped if it is."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from .arrow import Columns
from .errors import CheckFailed, DamagedDataset, MissingPackage, OptionError
from .manifest import read_manifest, shards_of, stray_shards
from .shards import check_file, check_shard, read_shard

IGNORED = -100
"""The label of a position that gives no loss, as PyTorch and transformers have it."""

FORMATS = ("numpy", "torch")
SHIFTS = ("none", "labels")
VERIFY = ("fast", "full", "off")


class Dataset(Sequence[dict[str, Any]]):
    """The rows of a dataset; made by `load`.

    A row is a dict of `input_ids` (int32 `[n]`), `loss_mask` (uint8 `[n]`, 1 = this token is a target, never shifted), `labels`
    (int64 `[n]`, -100 where there is no loss), `spans` (tuple of `Span`), `source` (`file`, `line`) and `sample` (`index`,
    `variant`). In numpy format `input_ids` and `loss_mask` are read-only views of the file; in torch format they are copies,
    `input_ids` as int64. A slice gives a list of rows. Can be handed to worker processes: each opens the files itself.

    Attributes:
        path: the directory.
        manifest: its manifest.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], format: str, shift: str) -> None:
        self.path = path
        self.manifest = dict(manifest)
        self._format = format
        self._shift = shift
        self._torch = _import_torch() if format == "torch" else None
        self._batches: list[Any] = []
        for shard in shards_of(manifest):
            check_file(path / shard.file, shard.bytes, None)
            table = read_shard(path / shard.file)
            if table.num_rows != shard.rows:
                raise DamagedDataset(
                    f"{path / shard.file}: {table.num_rows} rows, but the manifest says {shard.rows}; build again"
                )
            self._batches.extend(table.to_batches())
        self._starts: list[int] = list(accumulate((batch.num_rows for batch in self._batches), initial=0))
        self._columns: list[Columns | None] = [None] * len(self._batches)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _reopen, (self.path, self.manifest["manifest_sha256"], self._format, self._shift)

    def __repr__(self) -> str:
        tokens, supervised = self.manifest["tokens"], self.manifest["supervised_tokens"]
        return f"<chatmask dataset {str(self.path)!r}: {len(self)} rows, {tokens} tokens, {supervised} supervised>"

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._row(index) for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return one row (negative indices count from the end), or a list of rows for a slice."""
        if isinstance(index, slice):
            return [self._row(row) for row in range(*index.indices(len(self)))]
        row = operator.index(index)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self._row(row % len(self))

    def _row(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._starts, index) - 1
        batch, row = self._batches[number], index - self._starts[number]
        columns = self._columns[number]
        if columns is None:
            columns = self._columns[number] = Columns.of(batch)
        part = slice(int(columns.offsets[row]), int(columns.offsets[row + 1]))
        ids, mask = columns.ids[part], columns.mask[part]
        result: dict[str, Any] = {"input_ids": ids, "loss_mask": mask, "labels": labels_of(ids, mask, self._shift)}
        if self._torch is not None:
            result["input_ids"] = self._torch.from_numpy(ids.astype(np.int64))
            result["loss_mask"] = self._torch.from_numpy(mask.copy())
            result["labels"] = self._torch.from_numpy(result["labels"])
        result["spans"] = columns.spans(row)
        result["source"] = batch.column(3)[row].as_py()
        result["sample"] = batch.column(4)[row].as_py()
        return result


def labels_of(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], shift: str = "none") -> npt.NDArray[np.int64]:
    """Make labels from ids and mask, both `[n]`.

    With `none`, `labels[k]` is token k itself where `mask[k]` is 1 (for models that shift inside, as those of transformers do).
    With `labels`, `labels[k]` is what position k must predict: token k + 1 where `mask[k + 1]` is 1; the last one is -100.
    """
    labels = np.where(mask == 1, ids, IGNORED).astype(np.int64)
    if shift == "labels":
        labels = np.append(labels[1:], IGNORED) if len(labels) else labels
    return labels


def load(
    path: str | Path,
    *,
    format: str = "numpy",
    tokenizer: Any = None,
    verify: str = "fast",
    shift: str = "none",
    allow_demo: bool = False,
) -> Dataset:
    """Open a dataset for training, memory-mapped.

    Args:
        path: the directory that a build wrote.
        format: `numpy` or `torch`.
        tokenizer: the one you train with (directory or loaded); refused if the dataset was built with another one.
        verify: `fast` compares size and SHA-256 of every file with the manifest; `full` also checks every buffer and row;
            `off` only the manifest, sizes and row counts.
        shift: `none` or `labels`, see `labels_of`.
        allow_demo: allow a dataset that was built with the demo tokenizer.

    Raises:
        DamagedDataset: missing, unfinished or damaged.
        CheckFailed: nothing is supervised, a demo dataset, or another tokenizer or template.
        OptionError: an unknown option value.
        MissingPackage: `format="torch"` without torch.
    """
    for name, value, known in (("format", format, FORMATS), ("shift", shift, SHIFTS), ("verify", verify, VERIFY)):
        if value not in known:
            raise OptionError(f"{name}={value!r}: not known; choose one of {', '.join(known)}")
    directory = Path(path).absolute()
    manifest = read_manifest(directory)
    _refuse_unusable(directory, manifest, allow_demo)
    if tokenizer is not None:
        _refuse_other_tokenizer(directory, manifest, tokenizer)
    if verify != "off":
        check_files(directory, manifest, full=verify == "full")
    return Dataset(directory, manifest, format, shift)


def verify(path: str | Path) -> dict[str, int]:
    """Check a whole dataset: manifest, every file, every Arrow buffer, every row.

    Args:
        path: the directory that a build wrote.

    Returns:
        Counts: `rows`, `tokens`, `supervised_tokens`, `shards`, `files` (with the manifest) and `bytes` (without it).

    Raises:
        DamagedDataset: with the name of the first file that is not as it was written, and how.
        CheckFailed: a shard supervises nothing.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    _refuse_unusable(directory, manifest, allow_demo=True)
    check_files(directory, manifest, full=True)
    sizes = [shard.bytes for shard in shards_of(manifest)] + [entry["bytes"] for entry in manifest["files"].values()]
    counts = {name: int(manifest[name]) for name in ("rows", "tokens", "supervised_tokens")}
    return {**counts, "shards": len(manifest["shards"]), "files": len(sizes) + 1, "bytes": sum(sizes)}


def check_files(directory: Path, manifest: Mapping[str, Any], full: bool = False) -> None:
    """Check size and SHA-256 of every file of a dataset, and with `full` every row; raises DamagedDataset with the file."""
    shards = shards_of(manifest)
    for name in stray_shards(directory, shards):
        raise DamagedDataset(f"{directory / name}: a shard that the manifest does not name; remove it, or build again")
    for name, entry in manifest["files"].items():
        check_file(directory / name, entry["bytes"], entry["sha256"])
    for shard in shards:
        check_shard(directory / shard.file, shard, full)


def _refuse_unusable(directory: Path, manifest: Mapping[str, Any], allow_demo: bool) -> None:
    if not manifest["supervised_tokens"]:
        raise CheckFailed(
            f"{directory}: {manifest['rows']} rows and not one supervised token; training on it would learn nothing"
        )
    for shard in shards_of(manifest):
        if shard.supervised_tokens < shard.rows:
            raise CheckFailed(f"{directory / shard.file}: {shard.rows} rows but only {shard.supervised_tokens} supervised tokens")
    tokenizer = manifest.get("tokenizer")
    if not allow_demo and isinstance(tokenizer, Mapping) and tokenizer.get("demo") is True:
        raise CheckFailed(
            f"{directory}: built with the demo tokenizer, whose ids mean nothing to a real model; build again with --tokenizer, "
            "or pass allow_demo=True to look at it"
        )


def _refuse_other_tokenizer(directory: Path, manifest: Mapping[str, Any], tokenizer: Any) -> None:
    from .tokenizers import fingerprint_of

    found = fingerprint_of(tokenizer)
    for part, key in (("tokenizer", "sha256"), ("template", "template_sha256")):
        entry = manifest.get(part)
        built = entry.get("sha256") if isinstance(entry, Mapping) else None
        if built is None:
            raise DamagedDataset(f"{directory}: the manifest has no {part}.sha256, so the {part} cannot be compared; build again")
        if built != found[key]:
            what = "chat template" if part == "template" else part
            raise CheckFailed(
                f"{directory}: built with another {what} (sha256 {built}) than the one given ({found[key]}); "
                f"load the {what} that the dataset was built with, or build again with this one"
            )


def _reopen(path: Path, seal: str, format: str, shift: str) -> Dataset:
    manifest = read_manifest(path)
    if manifest["manifest_sha256"] != seal:
        raise DamagedDataset(f"{path}: was built anew since it was opened; load it again")
    return Dataset(path, manifest, format, shift)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingPackage("format='torch' needs PyTorch: pip install torch (or use format='numpy')") from error
    return torch


def collate(rows: Sequence[Mapping[str, Any]], pad_token_id: int, *, pad_to_multiple_of: int = 1) -> dict[str, Any]:
    """Stack rows into one batch, padded on the right. Labels and masks come from the rows, never from ids, so pad = eos is safe.

    Args:
        rows: at least one row of a `Dataset`, all of one format.
        pad_token_id: fills `input_ids`.
        pad_to_multiple_of: the padded length is rounded up to a multiple of this.

    Returns:
        `input_ids`, `attention_mask` (1 on real tokens) and `labels` (-100 on padding), all int64 `[rows, length]`, and
        `loss_mask` (uint8, 0 on padding); torch tensors if the rows hold torch tensors, else numpy arrays.

    Raises:
        OptionError: no rows, a bad pad id or multiple, or a row whose columns differ in length.
    """
    if not rows:
        raise OptionError("collate needs at least one row")
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, (int, np.integer)) or pad_token_id < 0:
        raise OptionError(
            f"pad_token_id={pad_token_id!r}: give a token id; where the tokenizer has none, its eos_token_id is safe"
        )
    if pad_to_multiple_of < 1:
        raise OptionError(f"pad_to_multiple_of={pad_to_multiple_of!r}: give 1 or more")
    lengths = [len(row["input_ids"]) for row in rows]
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row["labels"]) != length or len(row["loss_mask"]) != length:
            raise OptionError(f"rows[{index}]: input_ids, labels and loss_mask differ in length")
    width = -(-max(lengths) // pad_to_multiple_of) * pad_to_multiple_of
    full = partial(np.full, (len(rows), width))
    batch: dict[str, Any] = {
        "input_ids": full(pad_token_id, dtype=np.int64),
        "attention_mask": full(0, dtype=np.int64),
        "labels": full(IGNORED, dtype=np.int64),
        "loss_mask": full(0, dtype=np.uint8),
    }
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        batch["attention_mask"][index, :length] = 1
        for name in ("input_ids", "labels", "loss_mask"):
            batch[name][index, :length] = row[name]
    if isinstance(rows[0]["input_ids"], np.ndarray):
        return batch
    torch = _import_torch()
    return {name: torch.from_numpy(array) for name, array in batch.items()}
