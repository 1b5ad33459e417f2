"""chatmask: raw conversations in, verified Arrow shards with assistant loss masks out.

The public names are loaded when they are first used, so that `import chatmask` and `chatmask --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .errors import (
        BuildLocked,
        ChatmaskError,
        CheckFailed,
        DamagedDataset,
        InputError,
        RejectedRow,
        RejectReason,
        SpecError,
        TemplateError,
        TokenizerError,
        TooManyRejects,
    )
    from .example import Example
    from .loading import Dataset, collate, load, verify
    from .parsers.parser import Parser, load_parser
    from .pipeline import BuildResult, build
    from .snapshots import check
    from .templates.infer import infer_spec
    from .templates.registry import list_specs, load_spec
    from .templates.spec import TemplateSpec

_WHERE = {
    **dict.fromkeys(
        (
            "BuildLocked", "ChatmaskError", "CheckFailed", "DamagedDataset", "InputError", "RejectReason", "RejectedRow",
            "SpecError", "TemplateError", "TokenizerError", "TooManyRejects",
        ),
        "errors",
    ),
    **dict.fromkeys(("Dataset", "collate", "load", "verify"), "loading"),
    "Example": "example",
    **dict.fromkeys(("Parser", "load_parser"), "parsers.parser"),
    **dict.fromkeys(("BuildResult", "build"), "pipeline"),
    "check": "snapshots",
    "infer_spec": "templates.infer",
    **dict.fromkeys(("list_specs", "load_spec"), "templates.registry"),
    "TemplateSpec": "templates.spec",
}  # fmt: skip

__all__ = [
    "BuildLocked",
    "BuildResult",
    "ChatmaskError",
    "CheckFailed",
    "DamagedDataset",
    "Dataset",
    "Example",
    "InputError",
    "Parser",
    "RejectReason",
    "RejectedRow",
    "SpecError",
    "TemplateError",
    "TemplateSpec",
    "TokenizerError",
    "TooManyRejects",
    "build",
    "check",
    "collate",
    "infer_spec",
    "list_specs",
    "load",
    "load_parser",
    "load_spec",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'chatmask' has no attribute {name!r}")
    value = getattr(import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value
