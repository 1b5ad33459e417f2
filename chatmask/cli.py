"""The command line: parses options, calls the library, and translates errors into messages and exit codes, once.

Exit codes: 0 done; 1 a check failed; 2 wrong usage, spec, tokenizer or input; 3 rejected rows above the limit; 75 another build
holds the directory. With `--json` the last line of standard output is one JSON object; everything else goes to standard error.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from . import __version__
from .errors import ChatmaskError, CheckFailed, TooManyRejects

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Translates ChatmaskError into a message on standard error and its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ChatmaskError as error:
            click.echo(f"chatmask: {error}", err=True)
            if ctx.obj and ctx.obj.get("json"):
                ledger = error.ledger if isinstance(error, (CheckFailed, TooManyRejects)) else {}
                _print_json({"error": str(error), "exit_code": error.exit_code, **ledger})
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("chatmask: stopped; a build goes on where it was when the same command is given again", err=True)
            ctx.exit(130)
        except click.UsageError as error:
            asked = "--json" in [*ctx.args, *getattr(ctx, "_protected_args", [])]
            error.show()
            if asked:
                _print_json({"error": error.format_message(), "exit_code": error.exit_code})
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            # the reader (head, less) has enough; nothing is wrong
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        except OSError as error:
            click.echo(f"chatmask: {error.filename or 'output'}: {error.strerror or error}", err=True)
            if error.errno == errno.ENOSPC:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered cannot be flushed at exit
            ctx.exit(2)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def _json_option(function: F) -> F:
    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.ensure_object(dict)["json"] = value
        return value

    text = "Print one JSON object as the last line of standard output."
    return click.option("--json", "as_json", is_flag=True, callback=remember, help=text)(function)


def _tokenizer_options(function: F) -> F:
    function = click.option("--demo", is_flag=True, help="Use the embedded demo tokenizer instead of a real one.")(function)
    text = "Tokenizer: a folder with tokenizer.json, or a hub id. Default: the spec's own hub id."
    return click.option("--tokenizer", metavar="DIR|ID", help=text)(function)


def _set_option(function: F) -> F:
    text = "Change a field of the spec, e.g. --set thinking.strip=true. May be given several times."
    return click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help=text)(function)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="chatmask")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Raw conversations in, verified Arrow shards with assistant loss masks out."""
    ctx.ensure_object(dict)


@main.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--spec", required=True, metavar="NAME|FILE", help="Spec of the chat template (`chatmask specs list`).")
@click.option("--out", metavar="DIR", help="Output directory. Default: ./<input name>.<spec>/")
@_tokenizer_options
@click.option("--bad-rows", type=click.Choice(["fail", "skip"]), default="fail", show_default=True, help="fail: a rejected row fails the build and nothing visible is written; skip: rejects go to rejects.jsonl.")  # fmt: skip
@click.option("--keep-rejected", is_flag=True, help="Write the content of rejected lines to rejects.jsonl too.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "fast", "tokenizers"]),
    default="auto",
    show_default=True,
    help="What encodes: the fast tokenizer where it is installed, proven equal and worth loading; that or an error; the `tokenizers` library. The ids are the same.",
)
@click.option("--profile", is_flag=True, help="Print where the time went, by step.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes; the bytes do not depend on it."
)
@click.option("--parity", type=click.Choice(["sample", "full", "off"]), default="sample", show_default=True, help="Compare trained prefixes with what the server would send: on a sample of the rows, on all, or not.")  # fmt: skip
@click.option("--policy", metavar="NAME|FILE", help="Policy: which samples are made and which turns are trained (policies/).")
@click.option("--split", type=click.Choice(["trajectory", "per_turn", "exact", "pre_split"]), help="One sample with all turns; one for each trained turn; the fewest with exact prefixes; records that are samples already. Default: the policy's, else trajectory.")  # fmt: skip
@click.option("--max-length", type=click.IntRange(min=1), metavar="N", help="Most tokens of a sample.")
@click.option("--overlength", type=click.Choice(["error", "drop", "last_turns", "first_turns", "explode"]), help="What becomes of a longer one; cuts fall between messages. Default: error.")  # fmt: skip
@click.option("--policy-set", "policy_overrides", metavar="KEY=VALUE", multiple=True, help="Change a field of the policy, e.g. --policy-set tool_error=mask. May be given several times.")  # fmt: skip
@click.option("--explain", type=click.IntRange(min=1), metavar="LINE", help="Build nothing: print what each step makes of that line of the first input.")  # fmt: skip
@click.option("--max-line-bytes", type=click.IntRange(min=1024), default=64 << 20, show_default=True, help="Reject longer lines.")
@click.option("--max-depth", type=click.IntRange(min=4, max=900), default=64, show_default=True, help="Reject deeper nesting.")
@click.option(
    "--max-messages", type=click.IntRange(min=1), default=10_000, show_default=True, help="Reject longer conversations."
)
@click.option("--force", is_flag=True, help="Replace a finished dataset that was built otherwise, or is damaged.")
@_set_option
@_json_option
def build(
    inputs: tuple[str, ...],
    spec: str,
    out: str | None,
    tokenizer: str | None,
    demo: bool,
    bad_rows: Any,
    keep_rejected: bool,
    backend: Any,
    profile: bool,
    workers: int,
    parity: Any,
    policy: str | None,
    split: str | None,
    max_length: int | None,
    overlength: str | None,
    policy_overrides: tuple[str, ...],
    explain: int | None,
    max_line_bytes: int,
    max_depth: int,
    max_messages: int,
    force: bool,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Turn raw conversations into a dataset with loss masks.

    INPUT: JSON lines (plain, gzip or zstd), a `.traj` or `.traj.json` trajectory, a Parquet file, or a dataset directory as
    `datasets.save_to_disk` writes it. Told by content; docs/data.md lists the shapes of records.
    """
    from .pipeline import build as run

    given = {"split": split, "max_length": max_length, "overlength": overlength}
    changes = [*policy_overrides, *(f"{name}={value}" for name, value in given.items() if value is not None)]
    if explain is not None:
        from .sampling import explain as run_explain

        told = run_explain(
            inputs[0],
            explain,
            spec,
            tokenizer=tokenizer,
            demo=demo,
            overrides=overrides,
            policy=policy,
            policy_overrides=changes,
        )
        for line in told:
            click.echo(line)
        return
    with _Progress() as progress:
        result = run(
            list(inputs),
            spec,
            out,
            tokenizer=tokenizer,
            demo=demo,
            overrides=overrides,
            bad_rows=bad_rows,
            workers=workers,
            parity=parity,
            policy=policy,
            policy_overrides=changes,
            backend=backend,
            keep_rejected=keep_rejected,
            max_line_bytes=max_line_bytes,
            max_depth=max_depth,
            max_messages=max_messages,
            force=force,
            progress=progress,
        )
    for line in _ledger_lines(result):
        click.echo(line, err=as_json)
    for line in _profile_lines(result) if profile else ():
        click.echo(line, err=True)
    if as_json:
        _print_json(result.summary)


@main.command()
@click.argument("path", metavar="DATASET|INPUT")
@click.option("--spec", metavar="NAME|FILE", help="Spec, for raw input.")
@_tokenizer_options
@click.option("--row", "rows", type=click.IntRange(min=0), multiple=True, metavar="N", help="Show row N (from 0). May be given several times.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Show at most N rows. Default: 10 for text and html, all for json.")  # fmt: skip
@click.option("--format", "style", type=click.Choice(["text", "json", "html"]), default="text", show_default=True)
@click.option("-o", "--output", metavar="FILE", help="Write to a file instead of standard output.")
@click.option("--full", is_flag=True, help="Do not fold long context.")
@_set_option
def inspect(
    path: str,
    spec: str | None,
    tokenizer: str | None,
    demo: bool,
    rows: tuple[int, ...],
    limit: int | None,
    style: str,
    output: str | None,
    full: bool,
    overrides: tuple[str, ...],
) -> None:
    """Show what is supervised, what is not, and why."""
    from .inspecting import inspect_rows, render_html, render_text, to_json

    if limit is None and style != "json" and not rows:
        limit = 10
    items = inspect_rows(
        path, spec=spec, tokenizer=tokenizer, demo=demo, overrides=overrides, rows=list(rows) or None, limit=limit
    )
    if style == "html":
        parts = iter([render_html(items, title=f"chatmask inspect {Path(path).name}")])
    elif style == "json":
        parts = (json.dumps(to_json(item), ensure_ascii=False) + "\n" for item in items)
    else:
        look: dict[str, Any] = {"color": _color(output), "width": _width(output), **({"fold": None} if full else {})}
        parts = (render_text(item, **look) + "\n" for item in items)
    _emit(parts, output)


@main.command()
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
@click.option("--tokenizer", metavar="DIR|ID", help="Run the same conversations on a real tokenizer and its own template.")
@click.option("--tokenizers", metavar="DIR", help="Folder with a tokenizer for each spec, by spec name or hub id in it.")
@click.option("--accept", is_flag=True, help="Take what is found as the new snapshots. Refused in CI.")
@click.option("--reason", metavar="TEXT", help="Why the new snapshots are right; kept in them.")
@_json_option
def check(
    specs: tuple[str, ...], tokenizer: str | None, tokenizers: str | None, accept: bool, reason: str | None, as_json: bool
) -> None:
    """Compare specs with their reference snapshots and name any drift.

    Without SPEC: all specs whose tokenizer is at hand, which are those with a demo template and those that --tokenizers holds.
    """
    from .snapshots import check as run
    from .snapshots import drift_lines

    report = run(specs, tokenizer=tokenizer, tokenizers=tokenizers, accept=accept, reason=reason)
    for line in drift_lines(report):
        click.echo(line, err=True)
    for name in report.accepted:
        click.echo(f"accepted {name}", err=as_json)
    state = f"{len(report.drifts)} drifted" if report.drifts else "all hold"
    click.echo(f"{report.cases} snapshots of {report.specs} specs: {state}", err=as_json)
    if report.skipped:
        click.echo(
            f"not checked, since their tokenizers are not at hand: {len(report.skipped)} specs; name one with --tokenizer DIR, "
            "or give a folder of tokenizers with --tokenizers DIR",
            err=True,
        )
    if as_json:
        _print_json(report.to_dict())
    if report.drifts:
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("dataset", metavar="DATASET")
@_json_option
def verify(dataset: str, as_json: bool) -> None:
    """Check every byte and every row of a finished dataset against its manifest."""
    from .loading import verify as run

    result = run(dataset)
    click.echo(
        f"{dataset}: whole; {result['rows']:,} rows, {result['tokens']:,} tokens, {result['supervised_tokens']:,} supervised, "
        f"{result['shards']} shards",
        err=as_json,
    )
    if as_json:
        _print_json({"dataset": dataset, "ok": True, **result})


@main.command()
@click.option("--tokenizer", required=True, metavar="DIR|ID", help="Tokenizer whose chat template is to be described.")
@click.option("--name", default="inferred", show_default=True, help="Name of the spec.")
@click.option(
    "-o", "--output", metavar="FILE", help="Write the spec to FILE and further modes beside it. Default: standard output."
)
@_json_option
def infer(tokenizer: str, name: str, output: str | None, as_json: bool) -> None:
    """Infer a spec from a tokenizer's chat template, proven turn by turn before it is printed."""
    from .templates.infer import infer as run
    from .templates.infer import to_yaml
    from .tokenizers import load_tokenizer

    found = run(load_tokenizer(tokenizer), Path(output).stem if output else name)
    files = {found.spec.name: found.to_yaml(), **{v["name"]: to_yaml(v) for v in found.variants}}
    click.echo("exact: every trained turn's prefix is what the server sends" if found.exact else "not exact everywhere", err=True)
    for reason in found.reasons:
        click.echo(f"  {reason}", err=True)
    if output:
        for spec_name, text in files.items():
            path = Path(output).with_stem(spec_name)
            _emit([text], str(path))
            click.echo(f"wrote {path}", err=True)
    else:
        click.echo(
            "\n".join(text if i == 0 else f"# --- {n}.yaml\n{text}" for i, (n, text) in enumerate(files.items())),
            nl=False,
            err=as_json,
        )
    if as_json:
        described = {"spec": found.spec.model_dump(mode="json"), "variants": list(found.variants)}
        _print_json({"exact": found.exact, "reasons": list(found.reasons), **described})


@main.group()
def specs() -> None:
    """List, show and probe specs."""


@specs.command("list")
@_json_option
def specs_list(as_json: bool) -> None:
    """All packaged specs: family, thinking mode, history, and what each was verified against.

    PREFIX: is every served prompt a prefix of the training text. REWRITTEN: which turns the snapshots show rendered otherwise than
    they were served (context: what precedes them; emission: a part of the turn itself is gone).
    """
    from .snapshots import rewritten_kinds
    from .templates.registry import list_specs, load_spec
    from .templates.spec import PRESERVES

    rows: list[dict[str, Any]] = []
    for name in list_specs():
        spec = load_spec(name)
        rows.append(
            {
                "name": name,
                "family": spec.family,
                "thinking": spec.thinking.mode,
                "prefix_stable": spec.prefix_stable,
                "preserve_thinking": spec.preserve_thinking,
                "rewritten": rewritten_kinds(spec),
                "verified": spec.verified,
                "own_vocabulary": None if spec.reference is None else spec.reference.own,
                "description": spec.description,
                "note": spec.note,
            }
        )
    table = [
        (
            r["name"],
            r["family"],
            r["thinking"],
            "stable" if r["prefix_stable"] else "breaks",
            "+".join(r["rewritten"]) or "-",
            "; ".join([*([PRESERVES] if r["preserve_thinking"] else []), *(r["verified"] or ["nothing"])]),
        )
        for r in rows
    ]
    head = ("NAME", "FAMILY", "THINKING", "PREFIX", "REWRITTEN", "VERIFIED AGAINST")
    widths = [max(len(str(row[i])) for row in [head, *table]) for i in range(5)]
    for row in [head, *table]:
        click.echo("  ".join(str(cell).ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip(), err=as_json)
    if as_json:
        _print_json({"specs": rows})


@specs.command("show")
@click.argument("name", metavar="NAME|FILE")
@_set_option
def specs_show(name: str, overrides: tuple[str, ...]) -> None:
    """One spec, resolved: what it inherits and every default written out, as YAML."""
    import yaml

    from .templates.registry import load_spec

    spec = load_spec(name, overrides)
    if spec.warning:
        click.echo(f"# {spec.warning}")
    click.echo(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)


@specs.command("template")
@click.argument("name", metavar="NAME|FILE")
@_tokenizer_options
@_set_option
def specs_template(name: str, tokenizer: str | None, demo: bool, overrides: tuple[str, ...]) -> None:
    """The chat template that a spec renders with, as text: under preserve_thinking the rewritten one, to hand to a server."""
    from .parsers.parser import load_parser

    parser = load_parser(name, tokenizer=tokenizer, demo=demo, overrides=overrides)
    click.echo(parser.template_text, nl=False)
    for gate in parser.gates:
        click.echo(f"{parser.spec.name}: {gate}", err=True)


@specs.command("schema")
def specs_schema() -> None:
    """The JSON Schema of a spec file, for editors."""
    from .templates.spec import TemplateSpec

    click.echo(json.dumps(TemplateSpec.model_json_schema(), indent=2))


@specs.command("probe")
@click.argument("name", metavar="NAME|FILE")
@_tokenizer_options
@_set_option
@_json_option
def specs_probe(name: str, tokenizer: str | None, demo: bool, overrides: tuple[str, ...], as_json: bool) -> None:
    """Try every claim of a spec on a tokenizer's own template; expected beside found."""
    from .parsers.parser import probe

    reports = probe(name, tokenizer=tokenizer, demo=demo, overrides=overrides)
    for report in reports:
        click.echo(f"{report.spec} on {report.tokenizer}", err=as_json)
        for finding in report.findings:
            mark = "FAIL" if not finding.ok else "n/a " if finding.found.startswith("not supported") else "ok  "
            click.echo(
                f"  {mark}  {finding.claim}\n          expected  {finding.expected}\n          found     {finding.found}",
                err=as_json,
            )
    if as_json:
        _print_json({"ok": all(r.ok for r in reports), "reports": [_report(r) for r in reports]})
    if not all(report.ok for report in reports):
        raise click.exceptions.Exit(2)


def _report(report: Any) -> dict[str, Any]:
    findings = [{"claim": f.claim, "expected": f.expected, "found": f.found, "ok": f.ok} for f in report.findings]
    return {"spec": report.spec, "tokenizer": report.tokenizer, "ok": report.ok, "findings": findings}


# --- what people see ------------------------------------------------------------------------------------------------------------


def _profile_lines(result: Any) -> Iterator[str]:
    """Seconds by step, over all workers; what is left of the whole is start-up, planning and the commit."""
    total = sum(result.profile.values())
    yield f"profile: {result.seconds:.2f} s in all, {total:.2f} s in the steps below; {result.backend}"
    for step, seconds in result.profile.items():
        if seconds > 0:
            yield f"  {step:<10} {seconds:8.3f} s  {seconds / total:5.1%}"


def _ledger_lines(result: Any) -> Sequence[str]:
    ledger = result.ledger
    share = 100 * ledger.supervised_tokens / ledger.tokens if ledger.tokens else 0.0

    def counts(values: dict[str, int]) -> str:
        shown = [f"{n:,} {name}" for name, n in sorted(values.items()) if n]
        return f" ({', '.join(shown)})" if shown else ""

    head = "already built, nothing to do" if result.already_built else "built"
    if result.restarted:
        lines_before = "".join(f"\n    {line}" for line in result.restarted)
        head += f"; a stopped build of another kind was in the way and is gone. What differed:{lines_before}\n "
    if result.resumed_shards:
        head += f" ({result.resumed_shards} shards were there from a build that was stopped)"
    lines = [f"{result.dataset}: {head} with {result.manifest['spec']['name']}"]
    if result.manifest["tokenizer"]["demo"]:
        lines.append("  DEMO      made with the embedded demo tokenizer; no model has this vocabulary, so do not train on it")
    lines += [
        f"  lines     {ledger.lines:,} = {ledger.kept:,} kept + {ledger.rejects.total():,} rejected{counts(ledger.rejects)} "
        f"+ {ledger.dropped.total():,} dropped{counts(ledger.dropped)} + {ledger.blanks:,} blank",
        f"  samples   {ledger.samples:,} in {len(result.manifest['shards'])} shards",
        f"  tokens    {ledger.tokens:,}, of which {ledger.supervised_tokens:,} supervised ({share:.1f} %)",
        f"  turns     {ledger.turns:,} assistant turns, {ledger.trained_turns:,} trained{counts(ledger.untrained)}",
    ]
    if ledger.rewritten.total():
        lines.append(
            f"  rewritten {ledger.rewritten.total():,} turns render otherwise than they were served{counts(ledger.rewritten)}"
        )
    if ledger.parity["turns"]:
        broken = {"text": "text differs", "tokens": "last token straddles the border"}
        shown = counts({broken[k]: v for k, v in ledger.parity.items() if k in broken})
        declared = f"; as the spec declares{shown}" if shown else ", all equal"
        lines.append(f"  parity    {ledger.parity['turns']:,} turns compared with the served prompt{declared}")
    extra = {"control literals in content": ledger.control_text, "straddling tokens": ledger.straddles, "messages with declared drops": ledger.content_dropped}  # fmt: skip
    lines += [f"  note      {n:,} {what.replace('_', ' ')}" for what, n in {**extra, **ledger.notes}.items() if n]
    lines.append(f"  time      {result.seconds:.1f} s")
    return lines


class _Progress:
    """A bar on a terminal; elsewhere one plain line whenever another tenth is done (if there is more than one part)."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.tenth = 0

    def __enter__(self) -> _Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        if total < 2:
            return
        if sys.stderr.isatty():
            if self.bar is None:
                self.bar = click.progressbar(length=total, label="building", file=sys.stderr)
                self.bar.__enter__()
            self.bar.update(done - self.bar.pos)
        elif 10 * done // total > self.tenth:
            self.tenth = 10 * done // total
            click.echo(f"building: {done} of {total} parts", err=True)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.render_finish()


def _emit(parts: Iterable[str], path: str | None) -> None:
    """Write text to standard output, or to a file that appears whole or not at all."""
    if path is None or (os.path.exists(path) and not os.path.isfile(path)):
        # a pipe or a device cannot be replaced by a finished file
        with click.open_file(path or "-", "w", encoding="utf-8") as stream:
            for part in parts:
                stream.write(part)
        return
    from .storage import Storage

    Storage().write_parts(Path(path), (part.encode() for part in parts))


def _color(output: str | None) -> bool:
    return output is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _width(output: str | None) -> int | None:
    import shutil

    return shutil.get_terminal_size().columns if output is None and sys.stdout.isatty() else None
