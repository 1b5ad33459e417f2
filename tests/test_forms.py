"""The forms in which templates write turns: joined reasoning, headers behind tools, results, call ids, stops, SpecForge's spans."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.properties import forms


@pytest.mark.parametrize("check", forms.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_form(check: Callable[[], None]) -> None:
    """Each check of `tests/properties/forms.py` holds; its own docstring says what it promises."""
    check()
