"""The manifest: what a dataset is made of, sealed, written last; and the receipts from which a build resumes.

A directory without `manifest.json` is no dataset. `commit` is the only step that makes one: it moves the finished shards out of
the staging folder, writes the small files, and the manifest after everything else is on the disk. The manifest and each
receipt carry a SHA-256 of their own contents (the *seal*), so a changed bit in them is found as well.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .arrow import FEATURES
from .canonical import canonical_json, differences, fingerprint, readable_json
from .errors import CheckFailed, DamagedDataset
from .shards import SHARD_NAME, ShardInfo, check_file
from .storage import Storage, staging

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "REJECTS",
    "canonical_json",
    "check_names",
    "commit",
    "differences",
    "find_shard",
    "fingerprint",
    "finished_shard",
    "read_manifest",
    "read_receipt",
    "receipt_path",
    "seal",
    "shards_of",
    "stray_shards",
    "write_receipt",
]

MANIFEST = "manifest.json"
REJECTS = "rejects.jsonl"
DATASET_INFO = "dataset_info.json"
STATE = "state.json"
FORMAT_VERSION = 1

_SEAL = "manifest_sha256"
_RECEIPT_SEAL = "receipt_sha256"
_BARE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


# -- seals


def seal(value: Mapping[str, Any], key: str = _SEAL) -> dict[str, Any]:
    """Return a copy of `value` with `key` set to the fingerprint of everything else in it."""
    body = {name: item for name, item in value.items() if name != key}
    return {**body, key: fingerprint(body)}


def _unseal(data: bytes, key: str) -> dict[str, Any]:
    """Parse what was sealed and written; raises ValueError if any byte differs."""
    try:
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        if value.get(key) != seal(value, key)[key]:
            raise ValueError(f"{key} does not fit the contents")
        # The seal covers the values; this covers blanks, key order and repeated keys.
        if readable_json(value) != data:
            raise ValueError("the text is not what was written")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


# -- reading a manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and check `manifest.json`; no other file is opened.

    Args:
        directory: the dataset directory.

    Returns:
        The manifest. `shards_of` gives its shards.

    Raises:
        DamagedDataset: no such directory, unfinished, changed, of a newer format, or with file names that are no bare names.
    """
    path = directory / MANIFEST
    if not directory.exists():
        raise DamagedDataset(f"{directory}: no such directory; give the directory that `chatmask build --out` wrote")
    if not directory.is_dir():
        raise DamagedDataset(f"{directory}: not a directory; give the directory that `chatmask build --out` wrote")
    if not os.path.lexists(path):
        if staging(directory).is_dir():
            raise DamagedDataset(f"{directory}: unfinished: no {MANIFEST}; run the same `chatmask build` again, it resumes")
        raise DamagedDataset(f"{directory}: not a finished chatmask dataset (unfinished, or none at all): no {MANIFEST}")
    if path.is_symlink() or not path.is_file():
        raise DamagedDataset(f"{path}: not a regular file; build again")
    try:
        manifest = _unseal(path.read_bytes(), _SEAL)
    except (ValueError, OSError) as error:
        raise DamagedDataset(f"{path}: changed or cut after it was written ({error}); build again") from error
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise DamagedDataset(
            f"{path}: format_version is {version!r}, this chatmask reads {FORMAT_VERSION}; upgrade or build again"
        )
    try:
        _check_contents(manifest)
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedDataset(f"{path}: {error!s}; build again") from error
    return manifest


def shards_of(manifest: Mapping[str, Any]) -> list[ShardInfo]:
    """Return the shards that a manifest names, in order."""
    return [ShardInfo.from_dict(entry) for entry in manifest["shards"]]


def _check_contents(manifest: Mapping[str, Any]) -> None:
    for key, kind in (("shards", list), ("files", dict)):
        if not isinstance(manifest.get(key), kind):
            raise ValueError(f"field {key}: expected a {kind.__name__}, found {manifest.get(key)!r:.80}")
    shards = shards_of(manifest)
    check_names([*(shard.file for shard in shards), *manifest["files"]])
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or type(entry.get("sha256")) is not str:
            raise ValueError(f"files.{name}: expected bytes and sha256, found {entry!r:.80}")
    for key, value in _totals(shards).items():
        if manifest.get(key) != value:
            raise ValueError(f"field {key}: {manifest.get(key)!r}, but the shards add up to {value}")


def check_names(names: Sequence[str]) -> None:
    """Refuse file names that could lead out of the directory, or name one file twice.

    Raises:
        ValueError: with the first such name.
    """
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not _BARE_NAME.fullmatch(name):
            raise ValueError(f"file name {name!r:.220}: only bare names of letters, digits, '.', '_' and '-' are allowed")
        # Two names that differ in case are one file on some systems.
        if name.casefold() in seen or name.casefold() == MANIFEST:
            raise ValueError(f"file name {name!r} stands twice")
        seen.add(name.casefold())


def _totals(shards: Sequence[ShardInfo]) -> dict[str, int]:
    return {name: sum(getattr(shard, name) for shard in shards) for name in ("rows", "tokens", "supervised_tokens")}


# -- receipts


def receipt_path(directory: Path, shard: str) -> Path:
    """Return where the receipt of a shard lies while `directory` is being built."""
    return staging(directory) / f"{shard}.json"


def write_receipt(storage: Storage, path: Path, receipt: Mapping[str, Any]) -> None:
    """Write a receipt, sealed, in one step. Write it after the shard that it is for.

    Args:
        storage: where all output goes through.
        path: see `receipt_path`.
        receipt: any JSON values; `fingerprint` and `shard` (a `ShardInfo.to_dict()`) are what `finished_shard` reads.
    """
    storage.write_atomic(path, readable_json(seal(receipt, _RECEIPT_SEAL)))


def read_receipt(path: Path) -> dict[str, Any] | None:
    """Return a receipt without its seal, or None where there is no whole and unchanged one (the shard is then built again)."""
    try:
        if path.is_symlink() or not path.is_file():
            return None
        receipt = _unseal(path.read_bytes(), _RECEIPT_SEAL)
    except (ValueError, OSError):
        return None
    del receipt[_RECEIPT_SEAL]
    return receipt


def find_shard(directory: Path, info: ShardInfo) -> Path | None:
    """Return the path of a shard that is whole: in the staging folder, or where a killed commit has moved it."""
    for path in (staging(directory) / info.file, directory / info.file):
        try:
            check_file(path, info.bytes, info.sha256)
        except (DamagedDataset, OSError):
            continue
        return path
    return None


def finished_shard(directory: Path, shard: str, run: str) -> dict[str, Any] | None:
    """Return the receipt of a shard that need not be built again, or None.

    Args:
        directory: the dataset directory.
        shard: file name of the shard.
        run: fingerprint of this build; a receipt of another one does not count.
    """
    receipt = read_receipt(receipt_path(directory, shard))
    if receipt is None or receipt.get("fingerprint") != run:
        return None
    try:
        info = ShardInfo.from_dict(receipt.get("shard"))
    except ValueError:
        return None
    return receipt if info.file == shard and find_shard(directory, info) else None


# -- commit


def commit(
    storage: Storage, directory: Path, shards: Sequence[ShardInfo], manifest: Mapping[str, Any], rejects: Iterable[bytes]
) -> dict[str, Any]:
    """Turn a finished staging folder into a dataset. May be killed at any point and called again.

    Args:
        storage: where all output goes through; the caller holds its lock on `directory`.
        directory: the dataset directory.
        shards: all shards in order, each in the staging folder or already moved by a commit that was killed.
        manifest: what else the manifest says (spec, tokenizer, template, options, inputs, ledger, ...).
        rejects: the bytes of `rejects.jsonl`, in parts.

    Returns:
        The sealed manifest, with `format_version`, `shards`, `files`, `rows`, `tokens` and `supervised_tokens` added.

    Raises:
        CheckFailed: no supervised token at all, or `manifest` says other totals than the shards; nothing was changed.
        DamagedDataset: a shard is missing or changed.
        StorageError: the disk refuses. The staging folder stays, so the build can resume.
    """
    totals = _check_commit(directory, shards, manifest)
    work = staging(directory)
    # From here to the last step there is no manifest, so nobody can mistake a mixture of old and new files for a dataset.
    storage.unlink(directory / MANIFEST)
    storage.fsync_dir(directory)
    for shard in shards:
        path = find_shard(directory, shard)
        if path is None:
            raise DamagedDataset(f"{work / shard.file}: the finished shard is gone or was changed; run the build again")
        if path.parent == work:
            storage.replace(path, directory / shard.file)
    files = {
        DATASET_INFO: [readable_json({"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""})],
        STATE: [readable_json(_state(shards))],
        REJECTS: rejects,
    }
    entries = {}
    for name, parts in files.items():
        size, sha256 = storage.write_parts(directory / name, parts, work / f".{name}.tmp")
        entries[name] = {"bytes": size, "sha256": sha256}
    for name in stray_shards(directory, shards):
        storage.unlink(directory / name)
    storage.fsync_dir(directory)
    body = {**manifest, **totals, "format_version": FORMAT_VERSION, "files": entries}
    sealed = seal({**body, "shards": [shard.to_dict() for shard in shards]})
    storage.write_atomic(directory / MANIFEST, readable_json(sealed), work / f".{MANIFEST}.tmp")
    storage.rmtree(work)
    return sealed


def stray_shards(directory: Path, shards: Sequence[ShardInfo]) -> list[str]:
    """Return the names of shard files in `directory` that are not among `shards`."""
    names = {shard.file for shard in shards}
    return sorted(name for name in os.listdir(directory) if SHARD_NAME.fullmatch(name) and name not in names)


def _check_commit(directory: Path, shards: Sequence[ShardInfo], manifest: Mapping[str, Any]) -> dict[str, int]:
    totals = _totals(shards)
    if not totals["supervised_tokens"]:
        raise CheckFailed(f"{directory}: {totals['rows']} rows and not one supervised token; refused to finish the dataset")
    for key, value in totals.items():
        if manifest.get(key, value) != value:
            raise CheckFailed(f"{directory}: the manifest says {key} {manifest[key]}, the shards add up to {value}")
    try:
        check_names([shard.file for shard in shards])
    except ValueError as error:
        raise CheckFailed(f"{directory}: {error}") from None
    for shard in shards:
        if not SHARD_NAME.fullmatch(shard.file):
            raise CheckFailed(f"{directory}: shard name {shard.file!r} is not of the form data-00000-of-00001.arrow")
    return totals


def _state(shards: Sequence[ShardInfo]) -> dict[str, Any]:
    return {
        "_data_files": [{"filename": shard.file} for shard in shards],
        "_fingerprint": fingerprint({"shards": [shard.sha256 for shard in shards]})[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
