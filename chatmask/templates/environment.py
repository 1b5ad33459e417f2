"""The Jinja sandbox that chat templates render in: the same one that transformers uses, with the clock pinned.

Source of every setting: `transformers.utils.chat_template_utils` (5.24.0): immutable sandbox, trimmed blocks, loop controls,
`{% generation %}` blocks, a plain `tojson`, a namespace that refuses underscored names.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import TemplateError
from .codegen import SAFE_DICT_METHODS, SAFE_STRING_METHODS, InlineLookups


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks render their body; the tags themselves say nothing to chatmask (its spans come from structure)."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a call that returns its body."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """The two things that templates do with `dict`, without its other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """A namespace that refuses underscored names, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r} on a namespace")


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The `tojson` filter of chat templates (Jinja's own would escape HTML)."""
    if isinstance(separators, list):
        separators = tuple(separators)
    return _encoder(ensure_ascii, indent, separators, sort_keys).encode(value)


@lru_cache(maxsize=64)
def _encoder(ensure_ascii: bool, indent: int | None, separators: Any, sort_keys: bool) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise jinja2.exceptions.TemplateError(message)


class Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, with a short way for what cannot be unsafe (`codegen.py`).

    Most of what a chat template does is to look up items of plain dictionaries and to call methods of strings. For these, exact
    type for exact type, the answer is given at once; it is the one that the sandbox would come to. All else goes through the
    sandbox's own checks.
    """

    code_generator_class = InlineLookups

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute` in a template: an attribute, else an item."""
        kind = type(obj)
        if attribute in _SAFE_METHODS.get(kind, ()):
            return getattr(obj, attribute)
        if kind is TemplateNamespace and not attribute.startswith("_"):
            values = object.__getattribute__(obj, "_Namespace__attrs")
            if attribute in values:
                return values[attribute]
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as jinja2 declares it)
        """A call in a template."""
        if type(__obj) is BuiltinMethodType and __obj.__name__ in _SAFE_METHODS.get(type(__obj.__self__), ()):
            kwargs.pop("_block_vars", None)  # jinja2's own business, which only a pass_context function is handed
            kwargs.pop("_loop_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


_SAFE_METHODS: dict[type, frozenset[str]] = {str: SAFE_STRING_METHODS, dict: SAFE_DICT_METHODS}


def environment(date: str | None = None, kind: type[Sandbox] = Sandbox) -> Sandbox:
    """A fresh sandbox.

    Args:
        date: `YYYY-MM-DD` that `strftime_now` formats. Without it a template that asks for the date raises TemplateError, since
            a build must give the same bytes tomorrow.
        kind: which class of sandbox.
    """
    env = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])

    def strftime_now(template: str) -> str:
        if date is None:
            raise TemplateError("the template prints today's date; pin it with `date: YYYY-MM-DD` in the spec (--set date=...)")
        return datetime.datetime.fromisoformat(date).strftime(template)

    env.filters["tojson"] = to_json
    env.globals.update(raise_exception=_raise, strftime_now=strftime_now, dict=_TemplateDict(), namespace=TemplateNamespace)
    return env


@lru_cache(maxsize=256)
def variables(source: str) -> frozenset[str]:
    """Names that a template reads and does not set itself, at least on some path."""
    return frozenset(meta.find_undeclared_variables(environment().parse(source)))


@lru_cache(maxsize=256)
def constants(source: str) -> tuple[str, ...]:
    """Every string that a template can write by itself: the string constants and raw text of its syntax tree."""
    tree = environment().parse(source)
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return tuple(texts)
