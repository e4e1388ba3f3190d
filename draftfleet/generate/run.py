"""The run of `draftfleet generate`: check, start, produce, wait, write, sum up.

    prompts -> producer -> embedded Redis -> worker <-> servers          all in one folder, for one process at a time
            -> sample shards in DIR/RUN/samples -> the summary, and a JSON Lines file for people

It is `draftfleet up`, `produce`, `status` and `export-data` in one. Started again, it goes on from what is there.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from draftfleet import results, status
from draftfleet.accounting import Accountant, Accounting
from draftfleet.errors import DraftfleetError, RunMissing, ServerError
from draftfleet.generate import readable, settings_file
from draftfleet.generate.checks import Wanted, WrongInput, checked
from draftfleet.generate.display import Display, Looks, shown
from draftfleet.letters import EVERY, KINDS, Letter, find
from draftfleet.live import WorkerReport
from draftfleet.news import News
from draftfleet.reconcile import model_of
from draftfleet.roles import role
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage, open_storage
from draftfleet.up.foreground import in_flight
from draftfleet.up.stack import Stack
from draftfleet.up.stopping import Stopping

LOOK_S = 0.5
SHARE_OF_TIME = 0.2
"""A look at a large run takes longer: it gets no more than this share of a core."""

MESSAGE_SHOWN = 160

FLAG_OF = {"producer.data = ": "--prompts ", "worker.servers": "--servers", "target.path": "--target"}
"""As errors of the parts call it, and as this command does."""


def generate(settings: Settings, wanted: Wanted) -> int:
    """Answer the prompts. Exit code 0: each has an answer; 1: some failed; 130: interrupted, to be gone on with.

    Raises WrongInput where nothing was asked, ChildEnded where the worker ended by itself, StorageError where the
    answers could not be written.
    """
    began = time.monotonic()
    with Stopping() as stopping:
        try:
            with _refusals():
                settings, has_work = checked(settings, wanted)
            if has_work:
                _ask(settings, wanted, stopping)
            else:
                _tell(f"every prompt was answered before, in {settings.storage.url}: nothing is asked")
            run = Run.open(open_storage(settings.storage), settings.run)
            account = Accountant(run).account()
            lines = _write(run, wanted.jsonl) if wanted.jsonl and not stopping.code else None
            failed = _failed(run) if account.failed else {}
        except (KeyboardInterrupt, RunMissing):
            if not stopping.code:
                raise
            _tell("stopped, and nothing was asked")
            return stopping.code
    code = stopping.code or int(bool(account.failed or account.pending))
    said = _summary(run, account, failed) | {
        "jsonl": None if lines is None else f"{wanted.jsonl}",
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": code,
    }
    results.show(run.name, "stopped" if stopping.code else "generated", said)
    _advise(settings, account, failed, stopped=bool(stopping.code))
    return code


@contextmanager
def _refusals() -> Generator[None]:
    """What is wrong before anything was asked is wrong with the command, whatever it is."""
    try:
        yield
    except DraftfleetError as error:
        said = error.summary if isinstance(error, ServerError) else str(error)
        for knob, flag in FLAG_OF.items():
            said = said.replace(knob, flag)
        raise WrongInput(said) from error


def _ask(settings: Settings, wanted: Wanted, stopping: Stopping) -> None:
    """Until every row has an outcome, or a signal: then until what was in flight is finished or put aside."""
    logs = Path(settings.queue.embedded_dir) / "logs"
    stack = Stack(settings, logs, verb="generate", parts=["work"])
    with ExitStack() as ending:
        try:
            with _refusals():
                ending.enter_context(stack)
                stopping.hurry = stack.hurry
                role("produce")(stack.settings, progress=wanted.progress)
                if wanted.retries:
                    role("dead revive")(stack.settings, EVERY, every=True, dry_run=False)
            run = Run.open(open_storage(settings.storage), settings.run)
            if isinstance(run.storage, FileStorage):
                settings_file.write(settings, run.storage.root / settings_file.NAME)
            stack.hold.note(state="ready")
            _watch(stack, Accountant(run), bar=wanted.progress)
        except KeyboardInterrupt:
            _tell(f"stopping: {in_flight(stack)} (Ctrl-C again puts them aside at once)")


def _watch(stack: Stack, accountant: Accountant, *, bar: bool) -> None:
    looks, news = Looks(accountant.run.run_id), News()
    with shown(bar=bar) as display:
        while True:
            began = time.monotonic()
            stack.check()
            state = status.collect(stack.settings, accountant)
            _tell_news(display, news, state)
            display.show(looks.at(state))
            if state["expected"] is not None and not state["pending"]:
                return
            if state["control"]["state"] == "cancelled":
                display.tell("the run was cancelled")
                return
            time.sleep(max(LOOK_S, (time.monotonic() - began) / SHARE_OF_TIME))


def _tell_news(display: Display, news: News, state: dict[str, Any]) -> None:
    """What changed at the worker and at the servers, and where somebody has paused the run."""
    for line in news.of(map(WorkerReport.model_validate, state["workers"])):
        display.tell(line)
    ordered = state["control"]
    if line := news.changed("the run", ordered["state"], ordered["reason"]):
        display.tell(line)


def _write(run: Run, file: Path) -> int:
    count, corrupt = readable.write(run, file)
    for batch in corrupt:
        _tell(f"shard {batch} cannot be read and was left out: `draftfleet verify --repair` has it asked again")
    return count


def _failed(run: Run) -> dict[str, list[Letter]]:
    """The dead letters by kind."""
    found: dict[str, list[Letter]] = defaultdict(list)
    for letter in find(run):
        found[letter.kind].append(letter)
    return found


def _set_aside(run: Run) -> int:
    """Pending rows whose answer is kept already, until that of the last row of their batch is."""
    outstanding = set(run.outstanding())
    kept = (sample for name in run.partials() for sample in run.read_partial(name) if sample.batch in outstanding)
    return len({sample.row_key for sample in kept if sample.outcome != "unfinished"})


def _summary(run: Run, account: Accounting, failed: dict[str, list[Letter]]) -> dict[str, Any]:
    return {
        "model": model_of(run),
        "rows": account.rows,
        **{name: getattr(account, name) for name in ("ok", "truncated", "failed", "pending", "tokens")},
        "set_aside": _set_aside(run) if account.pending else 0,
        "failed_for": {kind: len(letters) for kind, letters in failed.items()},
        "malformed_lines": int((run.sealed() or {}).get("last_pass", {}).get("malformed", 0)),
        "ids_not_exact": account.mismatched,
        "samples": f"{run.storage.url}/{run.name}/samples",
    }


def _advise(settings: Settings, account: Accounting, failed: dict[str, list[Letter]], *, stopped: bool) -> None:
    """What a person may want to do next."""
    file = Path(settings.storage.url.removeprefix("file://")) / settings_file.NAME
    config = f" --config {file}" if file.exists() else ""
    for kind, letters in failed.items():
        said = " ".join(letters[0].message.split())[:MESSAGE_SHOWN]
        _tell(f"{len(letters):,} failed, {kind}: {KINDS[kind]}; as {letters[0].name[:12]}: {said}")
    if failed:
        _tell(f"see them: draftfleet dead list{config}; ask them again: the same command with --retry-failed")
    if account.mismatched:
        _tell(f"{account.mismatched:,} answers have ids that do not match the server's count: kept, not trained on")
    if stopped or account.pending:
        _tell("the same command goes on from here: what was answered is not asked again")
    elif config:
        _tell(f"go on with it: draftfleet status{config}, draftfleet train{config}, draftfleet export-data DIR{config}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
