"""The Jinja sandbox that chat templates render in: the same one that transformers uses, with the clock pinned.

Source of every setting: `transformers.utils.chat_template_utils` (5.24.0): immutable sandbox, trimmed blocks, loop controls,
`{% generation %}` blocks, a plain `tojson`, a namespace that refuses underscored names.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import TemplateError


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


class _TemplateNamespace(Namespace):
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise jinja2.exceptions.TemplateError(message)


def environment(date: str | None = None) -> ImmutableSandboxedEnvironment:
    """A fresh sandbox.

    Args:
        date: `YYYY-MM-DD` that `strftime_now` formats. Without it a template that asks for the date raises TemplateError, since
            a build must give the same bytes tomorrow.
    """
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])

    def strftime_now(template: str) -> str:
        if date is None:
            raise TemplateError("the template prints today's date; pin it with `date: YYYY-MM-DD` in the spec (--set date=...)")
        return datetime.datetime.fromisoformat(date).strftime(template)

    env.filters["tojson"] = to_json
    env.globals.update(raise_exception=_raise, strftime_now=strftime_now, dict=_TemplateDict(), namespace=_TemplateNamespace)
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
