"""Write docs/cli.md from the command line's own help; `--check` fails when the page is stale."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from chatmask.cli import main

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# Command line

Made by `make docs` from `--help`; CI fails when it is stale.

Exit codes: 0 done; 1 a check failed (drift, zero supervision, parity, verify); 2 wrong usage, or a spec, tokenizer, input or output that cannot be used;
3 rejected rows above the limit; 75 another build holds the directory. `--json` prints one JSON object as the last line of
standard output; everything else then goes to standard error.
"""


def sections(command: click.Command, name: str, parent: click.Context | None = None) -> list[str]:
    """The help of a command and of everything below it."""
    settings = {**command.context_settings, "terminal_width": 100, "max_content_width": 100}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    title = context.command_path
    found = [f"## {title}\n\n```\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            sub = command.get_command(context, child)
            assert sub is not None
            found += sections(sub, child, context)
    return found


def page() -> str:
    """The whole page."""
    return HEAD + "\n" + "\n".join(sections(main, "chatmask"))


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
            sys.exit(f"{PAGE.name} is stale: run `make docs` and commit it")
    else:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
