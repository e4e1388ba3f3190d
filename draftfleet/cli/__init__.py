"""`draftfleet VERB`: read the flags, load the settings, import the role and hand over.

What a verb has to tell goes to standard error; its result is one JSON line on standard output.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import draftfleet
from draftfleet import logs
from draftfleet.cli import (
    benching,
    continuing,
    dead,
    doctoring,
    exporting,
    faking,
    generation,
    health,
    importing,
    looking,
    reporting,
    runs,
    training,
)
from draftfleet.cli.role import ROLES
from draftfleet.errors import DraftfleetError, ServerError
from draftfleet.redaction import redact

__all__ = ["ROLES", "app", "main"]

VERBS: dict[str, Callable[..., None]] = {
    "generate": generation.generate,
    "produce": generation.produce,
    "import-data": importing.import_data,
    "presets": looking.presets,
    "work": generation.work,
    "doctor": doctoring.doctor,
    "train": training.train,
    "trainer": training.trainer,
    "capture-command": training.capture_command,
    "evaluate": training.evaluate,
    "export": training.export,
    "bench": benching.bench,
    "export-data": exporting.export_data,
    "join": generation.join,
    "status": looking.status,
    "verify": looking.verify,
    "report": reporting.report,
    "pause": runs.pause,
    "resume": runs.resume,
    "cancel": runs.cancel,
    "drain": runs.drain,
    "runs list": runs.list_runs,
    "runs priority": runs.priority,
    "runs budget": runs.budget,
    "runs delete": runs.delete,
    "continue": continuing.continue_,
    "dead list": dead.list_letters,
    "dead show": dead.show,
    "dead revive": dead.revive,
    "dead export": dead.export,
    "up": generation.up,
    "down": generation.down,
    "logs": generation.logs,
    "health": health.health,
    "flower": looking.flower,
    "fake-server": faking.fake_server,
    "settings": looking.list_settings,
}
"""In the order of the help. A verb of two words belongs to a group."""

GROUPS = {
    "runs": "List, rank, limit and delete runs.",
    "dead": "List, show, revive and export rows that failed.",
}


class Verbs(TyperGroup):
    """Turns what the user can mend into one line and an exit code, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DraftfleetError as error:
            said = "".join(traceback.format_exception(error)) if ctx.params["debug"] else f"draftfleet: {_text(error)}"
            typer.echo(redact(said), err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise
        except Exception as error:  # a fault of ours: Python itself would print what it quotes
            if type(error).__module__.partition(".")[0] in ("click", "typer"):
                if (said := _usage(error, ctx)) is None:
                    raise
                typer.echo(said, err=True)
                raise typer.Exit(2) from None
            typer.echo(redact("".join(traceback.format_exception(error))), err=True)
            raise typer.Exit(1) from None


def _usage(error: Any, ctx: Any) -> str | None:
    """A wrong flag or argument in one line; None if it is something else that the library tells by itself."""
    if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
        return None
    text, path = error.format_message(), (getattr(error, "ctx", None) or ctx).command_path
    return f"draftfleet: {text}{'' if text.endswith(('.', '?')) else '.'} `{path} --help` lists what there is."


def _text(error: DraftfleetError) -> str:
    """Of a server's error without the answer's body, which may quote a prompt: terminals are kept in logs."""
    if isinstance(error, ServerError) and error.body:
        return f"{error.summary} (not shown, it may quote a prompt: --debug shows it)"
    return str(error)


app = typer.Typer(
    cls=Verbs,
    help="Make a drafter for your own large model: ask it your prompts, store its answers, train on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show the traceback of an error.")] = False,
) -> None:
    if version:
        typer.echo(f"draftfleet {draftfleet.__version__}")
        raise typer.Exit
    logs.setup("DEBUG" if debug else "INFO")


groups = {name: typer.Typer(help=said, no_args_is_help=True, rich_markup_mode=None) for name, said in GROUPS.items()}
for name, verb in VERBS.items():
    group, _, short = name.rpartition(" ")
    (groups[group] if group else app).command(short)(verb)
for name, group_app in groups.items():
    app.add_typer(group_app, name=name)


def main() -> None:
    app(prog_name="draftfleet")
