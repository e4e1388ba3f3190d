"""The whole of draftfleet from a script: `from draftfleet import Run`. docs/python.md shows it.

Each method does what the verb of its name does, with the same settings and errors, and returns what it would print.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftfleet import control, orders, report, settings, status, verify
from draftfleet.accounting import Accountant, Accounting
from draftfleet.benching import Options
from draftfleet.export_data.export import Exported
from draftfleet.export_data.kept import Kept
from draftfleet.export_data.units import Wanted
from draftfleet.hub import Place
from draftfleet.letters import EVERY, Filter, Letter, find
from draftfleet.names import Split, is_again
from draftfleet.queue import connect
from draftfleet.records import Prompt, Sample
from draftfleet.roles import role
from draftfleet.runs import Run as Folder
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from draftfleet.training import Training
from draftfleet.up.stack import Stack

if TYPE_CHECKING:
    from producer.import_data.report import Report as ImportReport
    from producer.preview.dry_run import DryRun
    from producer.report import Report
    from trainer.evaluation.report import Evaluation
    from workers.bench import Bench
    from workers.doctor import Finding

LOOK_S = 0.5
SPLITS: tuple[Split, ...] = ("train", "heldout")


class Run:
    """A run, by its name: that of an existing one, or of one that the first `produce` makes.

        run = Run("first", storage="data", model="my-model", target="/models/my-model")

    `storage`, `model`, `target` and `servers` are the knobs that nearly every script sets; `settings` takes any other
    by its dotted path, as in `{"sampling.max_tokens": 4096}`, and wins. What is not said comes from the environment and
    from `config`, a settings file (unset: draftfleet.toml, if it is there). Raises SettingsError.
    """

    def __init__(
        self,
        name: str,
        *,
        storage: str | Path | None = None,
        model: str | None = None,
        target: str | Path | None = None,
        servers: Sequence[str] | None = None,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "storage.url": None if storage is None else str(storage),
            "target.model": model,
            "target.path": None if target is None else str(target),
            "worker.servers": None if servers is None else list(servers),
        }
        said = {path: value for path, value in given.items() if value is not None}
        self._config = config
        self._flags: dict[str, Any] = {"run": name, **said, **(settings or {})}
        self.name = name
        self.settings = self._load({})
        self._stack: Stack | None = None

    def __repr__(self) -> str:
        return f"Run({self.name!r}, storage={self.settings.storage.url!r})"

    # -- prompts and samples

    def produce(self, data: str | Path | Iterable[object], *, name: str = "script", progress: bool = False) -> Report:
        """Put prompts into the queue: a data set by its path or name, or any iterable.

        Items of an iterable are what a line of a file may be: a row such as `{"messages": [...]}`, a list of messages,
        or a text; `name` is what the samples say of where they came from. What the run holds already is left out, so a
        script may be run again. Raises DataError, RunConflict, RunBusy, StorageError or QueueError.
        """
        if isinstance(data, str | Path):
            return role("produce")(self._load(_of_data(str(data))), progress=progress)
        return role("produce")(self._load(_of_data(name)), progress=progress, rows=data)

    def dry_run(self, data: str | Path, **knobs: Any) -> DryRun:
        """Read a data set as `produce` would and tell of it; nothing is written. `knobs` are those of the verb."""
        return role("dry run found")(self._load(_of_data(str(data))), **knobs)

    def prompts(self) -> Iterator[Prompt]:
        """Every prompt that the run asks, batch by batch."""
        run = self.folder()
        for batch in run.batches():
            if not is_again(batch):
                yield from run.read_prompts(batch)

    def samples(self, split: Split | None = None) -> Iterator[Sample]:
        """Each row that has an outcome, once, as its best record says; batch by batch, the train split first.

        Rows of batches that are still at work are not among them. A shard that cannot be read is left out, and logged.
        """
        kept = Kept(self.folder())
        for one in SPLITS if split is None else (split,):
            for batch in kept.batches(one):
                yield from batch

    def dead_letters(self, wanted: Filter = EVERY) -> Iterator[Letter]:
        """The rows that failed and are not asked again, each with its error."""
        return find(self.folder(), wanted)

    def import_data(
        self,
        *files: str | Path,
        form: str | None = None,
        trust_text: bool | None = None,
        any_model: bool = False,
        unmatched: str | Path | None = None,
        dry_run: bool = False,
        progress: bool = False,
    ) -> ImportReport:
        """Make responses that were paid for samples of the run, which then asks only for what is missing."""
        return role("import-data")(
            self.settings,
            [str(file) for file in files],
            form=form,
            trust_text=trust_text,
            any_model=any_model,
            unmatched=None if unmatched is None else str(unmatched),
            dry_run=dry_run,
            progress=progress,
        )

    def export_data(
        self,
        folder: str | Path,
        wanted: Wanted | None = None,
        *,
        overwrite: bool = False,
        hub: Place | None = None,
        license: str | None = None,
        progress: bool = False,
    ) -> Exported:
        """Write the samples as a data set with a card; `hub` has it uploaded, too."""
        return role("export-data")(
            self.settings, folder, wanted, overwrite=overwrite, hub=hub, license=license, progress=progress
        )

    # -- the processes

    @contextmanager
    def up(self) -> Generator[Stack]:
        """Redis, a worker, a trainer and Flower on this machine while the block runs; they drain at its end."""
        logs = Path(self.settings.queue.embedded_dir) / "logs"
        with Stack(self.settings, logs) as stack:
            self._stack = stack
            try:
                yield stack
            finally:
                self._stack = None

    def work(self) -> int:
        """Ask this node's servers what is queued, until SIGTERM. In the main thread of a process of its own."""
        return role("work")(self.settings)

    def serve_trainer(self) -> int:
        """Train on this node what is queued, until SIGTERM. In the main thread of a process of its own."""
        return role("trainer")(self.settings)

    def wait(self, *, timeout_s: float | None = None) -> Accounting:
        """Until every row has an outcome, or the run was cancelled. Returns how its rows ended.

        Inside `up` it raises ChildEnded if a process ended. Raises TimeoutError, with how far it is.
        """
        accountant = Accountant(self.folder())
        deadline = Deadline(timeout_s)
        while True:
            account = accountant.account()
            if account.is_complete or control.read(accountant.run).state == "cancelled":
                return account
            self._check_processes()
            deadline.check(f"run {self.name}: {account.pending:,} of {account.rows:,} rows are pending.")
            time.sleep(LOOK_S)

    # -- looking

    def doctor(self, data: str | Path | None = None) -> list[Finding]:
        """Look for what would spoil the run, in under a minute: the worst first, each with what to do."""
        settings = self._load({} if data is None else _of_data(str(data)))
        return role("findings")(settings, first_prompts=role("prompts"), pins=role("pins"))

    def folder(self) -> Folder:
        """The run's folder in the storage: batches, shards, partials. Raises RunMissing."""
        return Folder.open(open_storage(self.settings.storage), self.name)

    def accounting(self) -> Accounting:
        """Where every row stands."""
        return Accountant(self.folder()).account()

    def status(self) -> dict[str, Any]:
        """What `draftfleet status --json` says: rows, batches, workers with their servers, drafters, the queue."""
        return status.collect(self.settings, Accountant(self.folder()))

    def verify(self) -> verify.Found:
        """Read every shard again. Nothing is moved: `draftfleet verify --repair` does that."""
        return verify.verify(self.folder())

    def report(self, file: str | None = None) -> report.Written:
        """Write what the run did as one HTML file, `NAME.html` here where none is named."""
        return report.report(self.settings, report.Options(file=file), progress=False)

    # -- orders

    def pause(self, reason: str = "") -> None:
        """Start no more rows, until `resume`."""
        orders.pause(self.settings, reason=reason)

    def resume(self) -> None:
        """Go on with a run that was paused or cancelled."""
        orders.resume(self.settings)

    def cancel(self, reason: str = "") -> None:
        """End the run with the samples that it has."""
        orders.cancel(self.settings, reason=reason)

    def set_priority(self, priority: control.Priority) -> None:
        orders.set_priority(self.settings, priority=priority)

    def set_token_budget(self, tokens: int | None) -> None:
        orders.set_budget(self.settings, tokens=tokens)

    def delete(self) -> None:
        """The run with its samples and drafters, for good."""
        role("runs delete")(self.settings)

    def revive(self, wanted: Filter = EVERY) -> dict[str, Any]:
        """Have rows that failed asked again. Returns how many, by kind."""
        return role("dead revive")(self.settings, wanted, every=True, dry_run=False)

    def go_on(self, max_tokens: int) -> dict[str, Any]:
        """Let answers go on that were cut at their length, up to so many tokens. Returns how many, and why others not.

        It is `draftfleet continue`, a word that Python keeps for itself.
        """
        return role("continue")(self.settings, max_tokens=max_tokens, dry_run=False)

    def drain(self, node: str | None = None, *, wait: bool = True) -> list[str]:
        """Have the workers of a node, or all of them, finish what is in flight and end. Returns their names."""
        return role("drain")(self.settings, node=node, all_nodes=node is None, wait=wait)

    # -- drafters

    def train(self, *, drafter: str | None = None, settings: Mapping[str, Any] | None = None) -> None:
        """Queue the training of a drafter; a trainer takes it up, and follows the samples as they come."""
        role("train")(self._load(_of_drafter(drafter) | dict(settings or {})))

    def wait_for_drafter(self, *, drafter: str | None = None, timeout_s: float | None = None) -> dict[str, Any]:
        """Until it is trained. Returns its progress: step, tokens, loss, accuracy by position.

        Raises TrainingError, with the end of its log, where nobody is at work on it any more; TimeoutError, with how
        far it is.
        """
        settings = self._load(_of_drafter(drafter))
        training = Training(settings, self.folder(), connect(settings))
        deadline = Deadline(timeout_s)
        while not training.is_over:
            training.check()
            self._check_processes()
            deadline.check(f"drafter {settings.trainer.drafter} is at step {training.progress.get('step', 0):,}.")
            time.sleep(LOOK_S)
        return training.progress

    def evaluate(self, *, drafter: str | None = None, checkpoint: str = "", progress: bool = False) -> Evaluation:
        """Measure a drafter on held-out prompts. `checkpoint`: best, latest or a step; unset, the best if measured."""
        return role("evaluate")(self._load(_of_drafter(drafter)), progress=progress, which=checkpoint)

    def export(
        self, *formats: str, drafter: str | None = None, checkpoint: str = "", hub: Place | None = None
    ) -> dict[str, str]:
        """Write the folders that engines serve, by format; all formats where none is named. `hub` has one uploaded.

        `checkpoint` as in `evaluate`.
        """
        return role("export")(self._load(_of_drafter(drafter)), list(formats), hub=hub, which=checkpoint)

    def bench(
        self,
        with_url: str,
        without_url: str | None = None,
        *,
        concurrency: Sequence[int] = (1, 8, 32),
        prompts: str | Path | None = None,
        limit: int = 32,
        max_tokens: int | None = None,
        repeat: int = 3,
        temperature: float = 0.0,
        drafter: str | None = None,
        progress: bool = False,
    ) -> Bench:
        """Measure a drafter in running servers, one with it and, for comparison, one without.

        `prompts` names a file; unset, held-out prompts of the run are asked. Raises ServerError, also where a server
        ended meanwhile: then the figures until there are in the drafter's bench.json.
        """
        options = Options(
            with_url=with_url,
            without_url=without_url,
            concurrency=concurrency,
            file=None if prompts is None else str(prompts),
            limit=limit,
            max_tokens=max_tokens,
            repeat=repeat,
            temperature=temperature,
        )
        settings = self._load(_of_drafter(drafter))
        return role("bench found")(settings, options, first_prompts=role("prompts"), progress=progress)

    def _check_processes(self) -> None:
        if self._stack is not None:
            self._stack.check()

    def _load(self, more: Mapping[str, Any]) -> Settings:
        return settings.load(self._config, {**self._flags, **more})


def _of_data(data: str) -> dict[str, Any]:
    return {"producer.data": data, "producer.sources": []}


def _of_drafter(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"trainer.drafter": name}


class Deadline:
    """None: never."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def check(self, state: str) -> None:
        """Raises TimeoutError, saying how things stand, once it has passed."""
        if self._at is not None and time.monotonic() > self._at:
            raise TimeoutError(state)
