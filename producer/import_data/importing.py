"""`draftfleet import-data`: read every response, find whose it is, and only then write. docs/import-data.md tells more.

Nothing is written before all files have been read: what a person has to decide is asked while nothing has happened yet.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import draftfleet
from draftfleet import tokens
from draftfleet.errors import DataError, SettingsError
from draftfleet.logs import event
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage, probe
from producer.import_data import forms
from producer.import_data.answers import Maker
from producer.import_data.files import File, find, lines
from producer.import_data.progress import bar
from producer.import_data.report import Report, Tally
from producer.import_data.responses import Refused, Response
from producer.import_data.slots import Slots, key_of, key_of_ids
from producer.import_data.writing import Written, write
from producer.produce import without_secrets
from producer.shapes import Malformed, Row

log = logging.getLogger(__name__)

NAMED = 10
"""Rows of each kind that are named in the log; the rest is a count."""

PATIENCE_LINES = 100
"""Rows of no known form, and none of one, after which the file is wrong and not its lines."""


def import_data(
    settings: Settings,
    paths: Sequence[str],
    *,
    form: str | None = None,
    unmatched: str | None = None,
    any_model: bool = False,
    trust_text: bool | None = None,
    dry_run: bool = False,
    progress: bool = False,
) -> Report:
    """Make the responses in these files samples of the run. Importing them again adds nothing.

    `unmatched` is a file for the rows that no prompt of the run asks for. `trust_text` says whether rows are trained on
    of which neither ids nor a count of tokens are known; with None, such rows are a SettingsError. Raises DataError,
    RunError, TargetError or StorageError, too: after a StorageError, run it again.
    """
    started = time.monotonic()
    forms.check(form)
    if not settings.target.path:
        raise SettingsError(
            "target.path is not set: its tokenizer checks the ids of responses, or makes them. Name it with --target."
        )
    found = find(paths)
    storage = open_storage(settings.storage)
    run = Run.open(storage, settings.run)
    tokenizer = tokens.load(Path(settings.target.path).expanduser())
    maker = Maker(run, tokenizer, any_model=any_model, trusts_text=bool(trust_text))
    slots = Slots(run)
    try:
        with bar("reading the run", len(run.batches()), enabled=progress) as step:
            for fault in slots.read(lambda: step(1)):
                log.warning(event("batch left out", run=run.name, why=fault))
        reader = _Reader(run, slots, maker, form, unmatched, progress=progress)
        reader.read(found)
        tally = reader.tally
        if tally.unchecked and trust_text is None and not dry_run:
            raise SettingsError(_undecided(tally))
        record, written = None, Written(imported=tally.taken)
        if tally.taken and not dry_run:
            probe(storage)
            record = _record(run, found, tally, trust_text=bool(trust_text), any_model=any_model)
            with bar("writing", slots.num_filled_batches, enabled=progress) as step:
                written = write(run, slots.filled(), lambda: step(1))
        if run.sealed() is None:
            log.warning(event("the producer has not finished: import again once it has", run=run.name))
        return _report(slots, found, tally, written, record=record, started=started)
    finally:
        slots.close()


class _Reader:
    """One pass over the files: each response finds its slot and becomes a sample, or is counted as what it is."""

    def __init__(
        self, run: Run, slots: Slots, maker: Maker, form: str | None, unmatched: str | None, *, progress: bool
    ) -> None:
        self.tally = Tally()
        self._run = run
        self._slots = slots
        self._maker = maker
        self._form = form
        self._unmatched = unmatched
        self._progress = progress
        self._named: dict[str, int] = {}

    def read(self, found: Sequence[File]) -> None:
        with bar("reading responses", sum(file.size for file in found), enabled=self._progress) as step:
            if self._unmatched is None:
                self._read_each(found, step, None)
                return
            try:
                with open(self._unmatched, "w", encoding="utf-8") as rest:
                    self._read_each(found, step, rest)
            except OSError as error:
                raise DataError(f"--unmatched {self._unmatched}: {error.strerror}. Name a file to write.") from None

    def _read_each(self, found: Sequence[File], step: Any, rest: IO[str] | None) -> None:
        for file in found:
            is_known, columns, num_unknown = False, dict[str, None](), 0
            for line in lines(file, step):
                self.tally.lines += 1
                try:
                    if isinstance(line.row, Malformed):
                        raise line.row
                    columns |= {} if is_known else dict.fromkeys(line.row)
                    self._row(file, line.number, line.row, rest)
                    is_known = True
                except Malformed as fault:
                    self.tally.malformed += 1
                    self._name("line malformed", file, line.number, fault)
                    num_unknown += isinstance(fault, forms.Unknown)
                    is_known |= fault is not line.row and not isinstance(fault, forms.Unknown)
                if not is_known and num_unknown >= PATIENCE_LINES:
                    raise forms.no_form(str(file.path), list(columns))
            if not is_known and num_unknown:
                raise forms.no_form(str(file.path), list(columns))

    def _row(self, file: File, number: int, row: Row, rest: IO[str] | None) -> None:
        responses = forms.read(row, self._form)
        self.tally.forms[self._form or forms.form_of(row)] += 1
        is_written = False
        for response in responses:
            try:
                if isinstance(response, Refused):
                    raise response
                if self._response(file, response):
                    continue
            except Refused as why:
                self.tally.refused[why.reason] += 1
                self._name("response refused", file, number, why)
                continue
            self.tally.unmatched += 1
            self._name("no prompt of the run", file, number, ", ".join(response.names)[:80])
            if rest is not None and not is_written:
                rest.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                is_written = True

    def _response(self, file: File, response: Response) -> bool:
        """False if nobody in the run asks for it. Raises Refused."""
        how, found = self._find(response)
        if not found:
            return False
        response = self._maker.complete(response)
        answer = [response.reasoning, response.content, response.tool_calls]
        slot = self._slots.free(found, answer)
        if isinstance(slot, str):
            setattr(self.tally, slot, getattr(self.tally, slot) + 1)
            return True
        sample = self._maker.sample(slot.prompt, response, batch=slot.batch, file=file.name)
        self._slots.fill(slot, found, answer, sample)
        self.tally.taken += 1
        self.tally.matched_by[how] += 1
        self._count(sample, response)
        return True

    def _find(self, response: Response) -> tuple[str, list[int]]:
        """By a name of ours, else by what was asked, else by the ids of that. Returns by which, and the slots."""
        names = [(key_of(name), "row_key") for name in response.names]
        names += [(bytes.fromhex(name), "prompt_id") for name in response.names if _is_prompt_id(name)]
        if (asked := response.asked) is not None:
            names.append((bytes.fromhex(asked.prompt_id), "source"))
            names.append((self._slots.asked_key(asked.messages, asked.tools), "messages"))
        for key, how in names:
            if found := self._slots.find([key]):
                return how, found
        if response.asked is None and response.prompt_token_ids is not None:
            with bar("tokenizing prompts", self._slots.num_slots, enabled=self._progress) as step:
                self._slots.index_prompt_ids(self._maker.prompt_ids, lambda: step(1))
            return "token_ids", self._slots.find([key_of_ids(response.prompt_token_ids)])
        return "", []

    def _count(self, sample: Sample, response: Response) -> None:
        kinds = self.tally.kinds
        kinds[sample.outcome] += 1
        kinds[sample.ids_source] += 1
        kinds["with_reasoning"] += bool(sample.reasoning)
        kinds["untrained"] += not sample.ids_match_usage
        self.tally.unchecked += sample.ids_source == "retokenized" and response.completion_tokens < 0

    def _name(self, text: str, file: File, number: int, why: object) -> None:
        self._named[text] = self._named.get(text, 0) + 1
        if self._named[text] <= NAMED:
            log.warning(event(text, file=file.name, line=number, why=why))
        if self._named[text] == NAMED:
            log.warning(event("further ones counted only", after=text))


def _is_prompt_id(name: str) -> bool:
    return len(name) == 32 and all(letter in "0123456789abcdef" for letter in name)


def _undecided(tally: Tally) -> str:
    return (
        f"{tally.unchecked} of {tally.taken} rows have neither token ids nor a count of their tokens, so nothing shows "
        "whether the ids that are made of their text are those the model produced; and once they are in the run, that "
        "cannot be changed. Nothing was written. --trust-text has them trained on all the same, --no-trust-text has "
        "them kept and not trained on."
    )


def _record(run: Run, found: Sequence[File], tally: Tally, *, trust_text: bool, any_model: bool) -> str:
    """RUN/imports/NAME.json says what was imported, before anything is: also where the import is then killed."""
    facts: dict[str, Any] = {
        "files": [file.facts() for file in found],
        "forms": dict(tally.forms),
        "responses": tally.responses,
        "to_import": tally.taken,
        "trust_text": trust_text,
        "any_model": any_model,
        "product_version": draftfleet.__version__,
        "command": without_secrets(sys.argv),
    }
    digest = "".join(sorted(one["sha256"] for one in facts["files"]))[:16]
    for number in range(10_000):
        name = f"{digest}-{number:04d}"
        raw = json.dumps(facts | {"began_at": time.time()}, indent=1, ensure_ascii=False).encode()
        if run.storage.put_if_absent(f"{run.name}/imports/{name}.json", raw):
            return name
    raise DataError(f"{run.storage.url}/{run.name}/imports is full of records of the same files.")


def _report(
    slots: Slots, found: Sequence[File], tally: Tally, written: Written, *, record: str | None, started: float
) -> Report:
    kinds = tally.kinds
    return Report(
        run=slots.run.name,
        run_id=slots.run.run_id,
        files=[file.name for file in found],
        forms=dict(tally.forms),
        lines=tally.lines,
        responses=tally.responses,
        imported=written.imported,
        already=tally.already + written.overtaken,
        surplus=tally.surplus,
        unmatched=tally.unmatched,
        malformed=tally.malformed,
        refused=tally.refused.total(),
        refused_for=dict(tally.refused),
        matched_by=dict(tally.matched_by),
        ok=kinds["ok"],
        truncated=kinds["truncated"],
        engine=kinds["engine"],
        retokenized=kinds["retokenized"],
        untrained=kinds["untrained"],
        with_reasoning=kinds["with_reasoning"],
        missing=slots.num_free,
        batches_done=written.batches_done,
        batches_begun=written.batches_begun,
        record=record,
        seconds=round(time.monotonic() - started, 3),
    )
