"""A pytest plugin, so that a trainer's own repository runs the snapshot check with its tests.

One line of configuration makes one test a spec (`SPEC`, or `SPEC = TOKENIZER` to check it on a tokenizer of yours):

    [tool.pytest.ini_options]
    chatmask_check = ["qwen3-thinking", "specs/own.yaml = /models/own"]

(paths of specs from the configuration file's folder), or on the command line `pytest --chatmask-check SPEC[=TOKENIZER]`. A test may also ask for the fixture `chatmask_check`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `--chatmask-check` and the ini value `chatmask_check`."""
    group = parser.getgroup("chatmask")
    group.addoption("--chatmask-check", action="append", default=[], metavar="SPEC[=TOKENIZER]", help="check a spec's snapshots")
    parser.addini("chatmask_check", "specs whose snapshots are checked: SPEC, or SPEC = TOKENIZER", type="linelist", default=[])


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one test a spec that is asked for; those of the configuration only where no paths or tests were named."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    configured = [] if named else [(entry, config.rootpath) for entry in config.getini("chatmask_check")]
    given = [(entry, config.invocation_params.dir) for entry in config.getoption("--chatmask-check")]
    for entry, folder in [*configured, *given]:
        spec, _, tokenizer = (part.strip() for part in entry.partition("="))
        path = str(folder / spec) if spec.endswith((".yaml", ".yml")) else spec
        items.append(SnapshotItem.from_parent(session, name=f"chatmask[{spec}]", spec=path, tokenizer=tokenizer or None))


class SnapshotItem(pytest.Item):
    """One spec's snapshots."""

    def __init__(self, *, spec: str, tokenizer: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spec, self.tokenizer = spec, tokenizer

    def runtest(self) -> None:
        """Run the check; raises SnapshotDrift where a snapshot does not hold."""
        assert_snapshots(self.spec, self.tokenizer)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The drift in words; a traceback would only show this file."""
        from .errors import ChatmaskError

        if isinstance(excinfo.value, (SnapshotDrift, ChatmaskError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where the test stands: in no file."""
        return "chatmask", None, self.name


class SnapshotDrift(AssertionError):
    """A snapshot that no longer holds; the message says which, in what way, and where it differs."""


def assert_snapshots(spec: str, tokenizer: Any = None) -> None:
    """Raise SnapshotDrift unless all snapshots of a spec hold.

    Args:
        spec: a packaged name or a YAML file with its snapshots beside it.
        tokenizer: directory, hub id or loaded tokenizer; None takes the demo tokenizer where the spec has a demo template, else
            the spec's own by its hub id.

    Raises:
        SnapshotDrift: a snapshot differs.
        SpecError, TokenizerError: the spec or the tokenizer cannot be had.
    """
    from .snapshots import check, drift_lines

    report = check([spec], tokenizer=tokenizer)
    if report.drifts:
        raise SnapshotDrift("\n".join(drift_lines(report)))


@pytest.fixture
def chatmask_check() -> Callable[..., None]:
    """`chatmask_check(spec, tokenizer=None)`: fails the test unless the spec's snapshots hold."""
    return assert_snapshots
