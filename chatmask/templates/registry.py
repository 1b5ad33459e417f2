"""Finding specs by name or file, resolving `extends`, and turning validation errors into file:line messages."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import SpecError
from .spec import TemplateSpec, merge
from .strict_yaml import Lines, given_file, load_yaml_file, override_pairs, parent_file, scalar, unknown_field

SpecLike = str | Path | TemplateSpec
_NOT_INHERITED = ("name", "extends", "description", "note", "verified")


def specs_dir() -> Path:
    """Folder of the packaged specs: inside the package when installed, at the repository's top level otherwise."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "specs"
    return inside if inside.is_dir() else package.parent / "specs"


def packaged_template(name: str) -> str:
    """Text of a packaged `.jinja` template; raises SpecError for an unknown name."""
    path = Path(__file__).parent / name
    if path.name != name or path.suffix != ".jinja" or not path.is_file():
        raise SpecError(f"there is no packaged template {name!r}")
    return path.read_text(encoding="utf-8")


def list_specs() -> list[str]:
    """Names of all packaged specs, sorted."""
    root = specs_dir()
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != "snapshots"]  # thousands of files, and none a spec
        found += [Path(folder, file).relative_to(root).with_suffix("").as_posix() for file in files if file.endswith(".yaml")]
    return sorted(found)


def load_spec(spec: SpecLike, overrides: Mapping[str, str] | Iterable[str] = ()) -> TemplateSpec:
    """Load and validate a spec.

    Args:
        spec: a packaged name (`ling-3.0-thinking`), a YAML file, or a spec object.
        overrides: `KEY=VALUE` strings (dotted keys, as in `--set thinking.strip=true`) or a mapping of the same.

    Raises:
        SpecError: file, line, field, what was found and what is allowed.
    """
    pairs = override_pairs(overrides, "--set", "--set thinking.strip=true")
    if isinstance(spec, TemplateSpec):
        if not pairs:
            return spec
        data, where = spec.model_dump(), spec.name
        lines: Lines = {}
    else:
        path = spec_file(spec)
        data, lines = _resolve(path, ())
        where = str(path)
    for key, value in pairs.items():
        data = _set(data, key, scalar(value, f"--set {key}"))
    return _validate(data, lines, where, list(pairs))


def spec_file(spec: str | Path) -> Path:
    """The YAML file of a packaged name, or the file itself; raises SpecError that names near matches."""
    file = given_file(spec, "spec")
    if file is not None:
        return file
    packaged = specs_dir() / f"{spec}.yaml"
    if packaged.is_file() and "snapshots" not in packaged.relative_to(specs_dir()).parts and ".." not in packaged.parts:
        return packaged
    near = difflib.get_close_matches(str(spec), list_specs(), 3, 0.4)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise SpecError(f"there is no spec named {spec!r}; {hint}`chatmask specs list` shows all, or give a .yaml file")


def _resolve(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], Lines]:
    data, lines = load_yaml_file(path)
    parent = data.get("extends")
    if parent is not None:
        seen = (*seen, path.resolve())
        base, _ = _resolve(parent_file(path, parent, lines, "spec", seen, spec_file), seen)
        whole = {"reference"} & set(data)  # one statement: half of the parent's would say something else
        data = merge({k: v for k, v in base.items() if k not in (*_NOT_INHERITED, *whole)}, data)
    template = data.get("template")
    if isinstance(template, str) and template.endswith(".jinja") and (path.parent / template).is_file():
        data["template"] = str(path.parent / template)
    return data, lines


def _set(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    over: Any = value
    for part in reversed(key.split(".")):
        over = {part: over}
    return merge(data, over)


def _validate(data: dict[str, Any], lines: Lines, where: str, overridden: Sequence[str] = ()) -> TemplateSpec:
    try:
        spec = TemplateSpec.model_validate(data)
        if spec.off is not None:
            spec.for_sample(False)
        return spec
    except ValidationError as error:
        problems = []
        for item in error.errors():
            path = tuple(part for part in item["loc"] if part in ("str",) or not str(part).startswith("list["))
            line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
            field = ".".join(str(part) for part in path) or "spec"
            text = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                text = unknown_field(str(path[-1]), _fields(data, path))
            option = next(
                (key for key in overridden if field == key or field.startswith(f"{key}.") or key.startswith(f"{field}.")), None
            )
            place = f"--set {option}" if option else f"{where}{f':{line}' if line else ''}"
            found = "" if isinstance(item["input"], dict) or item["type"] == "extra_forbidden" else f", found {item['input']!r}"
            problems.append(f"{place}: {field}: {text}{found}")
        raise SpecError("\n".join(problems)) from None


def _fields(data: dict[str, Any], path: tuple[Any, ...]) -> list[str]:
    model: Any = TemplateSpec
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
