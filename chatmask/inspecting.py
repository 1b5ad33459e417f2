"""Show what is supervised: every row as text, cut into what is trained, what is not, and why.

`dataset row | raw line -> Inspected (text, spans, segments) -> render_text | to_json | render_html`

Both ways in give the same view: a finished dataset is decoded from its token ids, a raw line is run through the parser and then
decoded from the ids that it would be written with. What is shown is therefore what a trainer gets, not what was meant.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckFailed, DamagedDataset, InputError, OptionError, RejectedRow, TokenizerError
from .example import Span
from .inspecting_html import render_html
from .inspecting_text import render_text
from .inspecting_view import Inspected, InspectedSpan, Rejection, Segment, View
from .loading import Dataset, load
from .manifest import MANIFEST
from .parsers.parser import Parser, load_parser
from .records import Record, parse, plan, read
from .storage import staging
from .templates.registry import SpecLike, load_spec, packaged_template
from .templates.spec import TemplateSpec
from .tokenizers import Tokenizer, demo_tokenizer, load_tokenizer

__all__ = ["Inspected", "InspectedSpan", "Rejection", "Segment", "inspect_rows", "render_html", "render_text", "to_json"]


def inspect_rows(
    path: str | Path,
    *,
    spec: SpecLike | None = None,
    tokenizer: Any = None,
    demo: bool = False,
    overrides: Mapping[str, str] | Sequence[str] = (),
    rows: Sequence[int] | None = None,
    limit: int | None = None,
) -> Iterator[Inspected]:
    """Show rows of a finished dataset, or of a raw input as a build would take them.

    Options are checked at the call; rows are read one at a time.

    Args:
        path: a dataset directory, or an input file.
        spec: needed for a raw input; a dataset knows its own (another one is refused).
        tokenizer: hub id, directory or loaded tokenizer; without it the hub id of the spec. For a dataset it must be the one
            that the dataset was built with.
        demo: the embedded demo tokenizer, for a raw input; a demo dataset takes it without being asked.
        overrides: `KEY=VALUE` changes to the spec.
        rows: only these rows, from 0, in the order of the input: rows of the dataset, or indices among the non-blank lines.
        limit: at most so many rows.

    Raises:
        OptionError: a row that does not exist, a negative limit, or an option that does not fit a dataset.
        InputError, SpecError, TokenizerError: the input, spec or tokenizer cannot be had.
        DamagedDataset, CheckFailed: the dataset is not whole, or was built with another tokenizer or spec.
    """
    if limit is not None and limit < 0:
        raise OptionError(f"limit is {limit}; give 0 or more")
    if rows is not None and (odd := [row for row in rows if row < 0]):
        raise OptionError(f"row {odd[0]}: rows count from 0")
    directory = Path(path)
    if _is_dataset(directory, spec):
        items = _dataset_rows(directory, spec, tokenizer, demo, overrides, rows)
    else:
        if spec is None:
            raise InputError(f"{path}: no dataset directory; for a raw input say which spec to read it with (--spec NAME|FILE)")
        items = _raw_rows(directory, load_parser(spec, tokenizer, demo, overrides), rows)
    return islice(items, limit)


def to_json(item: Inspected) -> dict[str, Any]:
    """The object that `inspect --format json` prints for a row (docs/data.md), or for a rejected line."""
    head: dict[str, Any] = {"row": item.row, "source": {"file": item.file, "line": item.line}}
    if item.reject is not None:
        reject = {"reason": item.reject.reason, "detail": item.reject.detail, "message": item.reject.message}
        return {**head, "reject": reject}
    names = ("message", "start", "end", "text", "trained", "reason")
    return {
        **head,
        "text": item.text,
        "tokens": item.tokens,
        "supervised_tokens": item.supervised_tokens,
        "spans": [{name: getattr(span, name) for name in names} for span in item.spans],
    }


# --- a finished dataset -------------------------------------------------------------------------------------------------------


def _is_dataset(path: Path, spec: SpecLike | None) -> bool:
    """With a spec, a directory that was never a dataset of ours is left to the reader of raw inputs, which knows what it reads."""
    return path.is_dir() and (spec is None or os.path.lexists(path / MANIFEST) or staging(path).exists())


def _dataset_rows(
    path: Path,
    spec: SpecLike | None,
    tokenizer: Any,
    demo: bool,
    overrides: Mapping[str, str] | Sequence[str],
    rows: Sequence[int] | None,
) -> Iterator[Inspected]:
    dataset = load(path, verify="fast", allow_demo=True)
    built = _spec_of(dataset)
    if spec is not None or overrides:
        asked = load_spec(built if spec is None else spec, overrides)
        if asked.sha256 != built.sha256:
            raise OptionError(
                f"{path}: was built with the spec {built.name}, and shows what that supervises; leave --spec and --set out, "
                "or inspect the raw input with the other spec"
            )
    loaded = _tokenizer_of(dataset, built, tokenizer, demo)
    _refuse_unknown_rows(str(path), rows, len(dataset))

    def items() -> Iterator[Inspected]:
        for row in range(len(dataset)) if rows is None else sorted(set(rows)):
            item = dataset[row]
            source, sample, spans = item["source"], item["sample"], item["spans"]
            if not np.array_equal(_mask_of(spans, len(item["input_ids"])), item["loss_mask"]):
                raise DamagedDataset(f"{path}: row {row}: loss_mask and spans disagree; build again")
            view = View(loaded, built, item["input_ids"], spans, None, f"{path}: row {row}")
            yield view.inspected(row, source["file"], source["line"], sample["index"], sample["variant"])

    return items()


def _spec_of(dataset: Dataset) -> TemplateSpec:
    try:
        return TemplateSpec.model_validate(dataset.manifest["spec"]["resolved"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDataset(
            f"{dataset.path}: the manifest holds no spec that this chatmask reads ({error}); build again"
        ) from None


def _tokenizer_of(dataset: Dataset, spec: TemplateSpec, given: Any, demo: bool) -> Tokenizer:
    """The tokenizer that the dataset was built with, and no other."""
    entry = dataset.manifest["tokenizer"]
    if demo and not entry["demo"]:
        raise OptionError(f"{dataset.path}: was not built with the demo tokenizer; leave --demo out and give --tokenizer DIR|ID")
    if entry["demo"] and given is None:
        if spec.demo_template is None:
            raise DamagedDataset(f"{dataset.path}: a demo dataset whose spec names no demo template; build again")
        loaded, ways_on = demo_tokenizer(packaged_template(spec.demo_template)), "it is of another version; build again"
    elif given is None and spec.tokenizer.id is None:
        raise OptionError(
            f"{dataset.path}: its spec {spec.name} names no tokenizer; give the one it was built with (--tokenizer DIR|ID)"
        )
    else:
        try:
            loaded = load_tokenizer(spec.tokenizer.id, spec.tokenizer.revision) if given is None else load_tokenizer(given)
        except TokenizerError as error:
            if given is not None:
                raise
            raise TokenizerError(
                f"{dataset.path}: give the tokenizer that the dataset was built with (--tokenizer DIR|ID); the spec's own hub id did "
                f"not help: {error}"
            ) from None
        ways_on = (
            "leave --tokenizer out" if entry["demo"] else "give the one that the dataset was built with (--tokenizer DIR|ID)"
        )
    if loaded.sha256 != entry["sha256"]:
        raise CheckFailed(
            f"{dataset.path}: built with another tokenizer (sha256 {entry['sha256']}) than {loaded.name} ({loaded.sha256}), "
            f"whose text for these ids would be wrong; {ways_on}"
        )
    return loaded


def _mask_of(spans: Sequence[Span], tokens: int) -> Any:
    mask = np.zeros(tokens, dtype=np.uint8)
    for span in spans:
        mask[span.start : span.end] = span.trained
    return mask


def _refuse_unknown_rows(path: str, rows: Sequence[int] | None, count: int) -> None:
    for row in rows or ():
        if row >= count:
            valid = f"its rows are 0 to {count - 1}" if count else "it has no rows"
            raise OptionError(f"row {row}: {path} has no such row; {valid}")


# --- a raw input --------------------------------------------------------------------------------------------------------------


def _raw_rows(path: Path, parser: Parser, rows: Sequence[int] | None) -> Iterator[Inspected]:
    _, chunks = plan([path])
    lines = chain.from_iterable(read(chunk) for chunk in chunks)
    records = enumerate(record for record in lines if not record.blank)
    if rows is not None:
        # read to the end first, so that an unknown row is said before anything is shown
        wanted, picked, count = set(rows), [], 0
        for row, record in records:
            count = row + 1
            if row in wanted:
                picked.append((row, record))
        _refuse_unknown_rows(str(path), rows, count)
        return (_inspect_record(row, record, parser) for row, record in picked)
    return (_inspect_record(row, record, parser) for row, record in records)


def _inspect_record(row: int, record: Record, parser: Parser) -> Inspected:
    name = "demo tokenizer" if parser.loaded.demo else parser.loaded.name
    try:
        # with the oracle, which finds every turn that a server would have seen otherwise: few rows are looked at, so it is cheap
        example = parser.example(parser.conversation(parse(record)), oracle=True)
    except RejectedRow as error:
        reject = Rejection(error.reason.value, error.detail, error.reason.advice, error.message)
        return Inspected(row, record.path, record.line, "", 0, 0, (), (), reject, (), parser.spec.name, name)
    view = View(parser.loaded, parser.spec, example.ids, example.spans, example, f"{record.path}:{record.line}")
    return view.inspected(row, record.path, record.line, 0, 0)
