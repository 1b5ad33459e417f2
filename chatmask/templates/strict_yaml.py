"""Strict YAML: the part of the language that a spec needs, and nothing that can surprise.

Refused: aliases and anchors (they can grow without bound), merge keys, duplicate keys (PyYAML keeps the last one in silence),
tags, several documents, bytes that are not UTF-8, files above 1 MiB, nesting above 16 levels. `on`, `off`, `yes` and `no` are
strings, as in YAML 1.2; only `true` and `false` are booleans.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import SpecError

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
Lines = dict[tuple[str | int, ...], int]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader (in C where it was built so, five times as fast) with the booleans of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false|True|False|TRUE|FALSE)$"), list("tTfF"))


def load_yaml(data: bytes | str, where: str) -> tuple[dict[str, Any], Lines]:
    """Read one YAML mapping.

    Args:
        data: the file's bytes (UTF-8) or text.
        where: what to call the file in errors.

    Returns:
        The mapping, and the line (1-based) of every key by its path.

    Raises:
        SpecError: with file, line and what to change.
    """
    if isinstance(data, bytes):
        if len(data) > MAX_BYTES:
            raise SpecError(f"{where}: {len(data):,} bytes; a spec has at most {MAX_BYTES:,}")
        try:
            data = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SpecError(f"{where}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    try:
        _refuse_surprises(data, where)
        node = yaml.compose(data, _Loader)
        lines: Lines = {}
        value = _value(node, (), lines, where)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecError(f"{where}{line}: not valid YAML: {problem}") from None
    if not isinstance(value, dict):
        raise SpecError(f"{where}:1: a spec is a mapping of fields, found {type(value).__name__}")
    return value, lines


def load_yaml_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """Read one YAML mapping from a file; errors as `load_yaml`."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: {path.stat().st_size:,} bytes; a spec has at most {MAX_BYTES:,}")
        return load_yaml(path.read_bytes(), str(path))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None


def scalar(text: str, where: str) -> Any:
    """The value of one `--set key=VALUE`, by the same rules as in a file."""
    return load_yaml(f"value: {text}" if text else 'value: ""', where)[0]["value"]


# --- what spec files and policy files share -----------------------------------------------------------------------------------


def override_pairs(overrides: Mapping[str, str] | Iterable[str], option: str, example: str) -> dict[str, str]:
    """`KEY=VALUE` strings, or a mapping of the same, as a dict; raises SpecError that names the option and gives an example."""
    if isinstance(overrides, Mapping):
        return dict(overrides)
    pairs = {}
    for item in overrides:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise SpecError(f"{option} {item}: write KEY=VALUE, for example {example}")
        pairs[key] = value
    return pairs


def given_file(name: str | Path, kind: str) -> Path | None:
    """The file where `name` is one (a Path, or text that ends in .yaml or .yml), None where it is a packaged name.

    Raises:
        SpecError: the file does not exist.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and not isinstance(name, Path):
        return None
    if path.is_file():
        return path
    raise SpecError(f"{path}: no such {kind} file")


def parent_file(
    path: Path, parent: Any, lines: Lines, kind: str, seen: Sequence[Path], find: Callable[[str | Path], Path]
) -> Path:
    """The file that `extends:` of `path` means: a file, or a name, of which one beside `path` comes before the packaged one.

    Args:
        path: the extending file.
        parent: value of its `extends`.
        lines: lines of its keys.
        kind: `spec` or `policy`.
        seen: files that led here, resolved.
        find: the file of a name or file; raises SpecError.

    Raises:
        SpecError: no text, no such file or name, or a circle.
    """
    if not isinstance(parent, str):
        raise SpecError(f"{path}:{lines.get(('extends',), 1)}: extends: one {kind} name or file")
    beside = path.parent / parent
    if beside.suffix not in (".yaml", ".yml"):
        # not itself: it may extend the packaged one of its own name
        named = beside.with_name(f"{beside.name}.yaml")
        beside = named if named.is_file() and named != path else find(parent)
    if beside.resolve() in seen:
        raise SpecError(f"{beside}: `extends` runs in a circle: {' -> '.join(p.stem for p in seen)} -> {beside.stem}")
    return beside


def unknown_field(name: str, known: Sequence[str]) -> str:
    """What is said of a field that nobody knows, with the nearest one that somebody does."""
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"unknown field{f'; did you mean `{near[0]}`?' if near else ''}; allowed: {', '.join(known)}"


def _refuse_surprises(text: str, where: str) -> None:
    documents = depth = 0
    for event in yaml.parse(text, _Loader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise SpecError(f"{where}:{line}: anchors and aliases are not allowed; write the value out")
        tag = getattr(event, "tag", None)
        if tag:
            raise SpecError(f"{where}:{line}: the tag {tag} is not allowed; specs hold plain values")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise SpecError(f"{where}:{line}: a second YAML document; keep one spec per file")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise SpecError(f"{where}:{line}: nested deeper than {MAX_DEPTH} levels")


def _value(node: Any, path: tuple[str | int, ...], lines: Lines, where: str) -> Any:
    if node is None:
        return None
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise SpecError(f"{where}:{line}: merge keys (<<) are not allowed; use `extends:`")
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError(f"{where}:{line}: a key must be a plain word")
            key = str(key_node.value)
            if key in result:
                raise SpecError(f"{where}:{line}: the key `{key}` stands twice; keep one")
            lines[(*path, key)] = line
            result[key] = _value(value_node, (*path, key), lines, where)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, (*path, index), lines, where) for index, child in enumerate(node.value)]
    loader = _Loader("")
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as error:
        raise SpecError(f"{where}:{node.start_mark.line + 1}: {error}") from None
    finally:
        loader.dispose()
