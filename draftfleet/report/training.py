"""The drafters of a run: how their training went, and what their evaluation says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftfleet import drafters
from draftfleet.acceptance import PARTS
from draftfleet.errors import CorruptFile, DraftfleetError
from draftfleet.report import words
from draftfleet.report.charts import Chart, Series, curves, tone
from draftfleet.roles import role
from draftfleet.runs import Run
from draftfleet.settings import Settings

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A line of the table of acceptance: of all drafts, or of a part. `shares` are by position, from 0 to 1."""

    name: str
    length: float
    interval: str
    drafts: int
    conversations: int
    shares: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    about: dict[str, str]
    kept: list[Kept]
    positions: int
    sweep: list[JSON]
    warnings: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """`faults` are files of it that cannot be read."""

    name: str
    algorithm: str
    state: str
    about: dict[str, str]
    charts: list[Chart]
    evaluated: Evaluated | None
    faults: list[str] = field(default_factory=list[str])


def drafters_of(settings: Settings, run: Run, progress: Mapping[str, JSON]) -> list[Drafter]:
    """`progress` is that of `status`."""
    return [_drafter(settings, run, name, said) for name, said in progress.items()]


def _drafter(settings: Settings, run: Run, name: str, progress: JSON) -> Drafter:
    faults: list[str] = []

    def read(file: str) -> JSON | None:
        try:
            return drafters.read(run, name, file)
        except CorruptFile as error:
            faults.append(str(error))
            return None

    curve = read("curve.json") or _tensorboard(settings, name)
    evaluation = read("evaluation.json")
    evaluated = None
    if evaluation is not None:
        try:
            evaluated = _evaluated(evaluation)
        except (KeyError, TypeError, ValueError) as error:
            faults.append(f"evaluation.json of drafter {name} is of another version: {error!r}")
    return Drafter(
        name=name,
        algorithm=str(progress.get("algorithm", "")),
        state=str(progress.get("state", "")),
        about=_about(progress),
        charts=_charts(curve),
        evaluated=evaluated,
        faults=faults,
    )


def _tensorboard(settings: Settings, name: str) -> JSON | None:
    """Of a training that an older version did, where its files are on this node and TensorBoard is installed."""
    try:
        return role("tensorboard curve")(settings, name)
    except (ImportError, DraftfleetError, OSError, KeyError, ValueError):
        return None


def _about(progress: JSON) -> dict[str, str]:
    best = progress.get("best")
    accuracy = progress.get("accuracy") or []
    said = {
        "step": f"{progress['step']:,} of {progress.get('max_steps', 0):,}",
        "loss": "" if progress.get("loss") is None else f"{progress['loss']:.3f}",
        "accuracy by position": ", ".join(f"{100 * value:.1f} %" for value in accuracy),
        "tokens": f"{progress.get('tokens', 0):,}",
        "rows": f"{progress.get('rows_admitted', 0):,}",
        "rows not trained on": ", ".join(
            f"{count:,} {why}" for why, count in (progress.get("rows_not_trained") or {}).items() if count
        ),
        "tokens per second": words.short(progress.get("tokens_per_s") or 0),
        "best checkpoint": f"step {best['step']:,}, {best['acceptance_length']:.2f} tokens per pass" if best else "",
        "error": (progress.get("error") or "").strip(),
    }
    return {name: value for name, value in said.items() if value}


def _charts(curve: JSON | None) -> list[Chart]:
    if not curve or not curve.get("steps"):
        return []
    steps: list[float] = curve["steps"]
    values: dict[str, list[float | None]] = curve["values"]
    found: list[Chart] = []
    if known := _known(values.get("loss")):
        said = f"From {known[0]:.3g} to {known[-1]:.3g}, at least {min(known):.3g}."
        found.append(curves("Loss", steps, [Series("loss", values["loss"], "accent")], summary=said))
    positions = sorted(
        (name for name in values if name.startswith("accuracy_") and name[9:].isdigit()), key=lambda name: int(name[9:])
    )
    if positions:
        series = [Series(f"position {name[9:]}", values[name], tone(at)) for at, name in enumerate(positions)]
        last = [known[-1] for one in series if (known := _known(one.values))]
        said = "The last: " + ", ".join(words.share(value, 1) for value in last) + "."
        found.append(
            curves(
                "Accuracy by position of a draft", steps, series, summary=said, write=lambda one: f"{100 * one:.0f} %",
                from_zero=True,
            )
        )  # fmt: skip
    if known := _known(values.get("acceptance_length")):
        places = [number for number, value in enumerate(values["acceptance_length"]) if value is not None]
        said = f"The best is {max(known):.2f} tokens per pass of the target, the latest {known[-1]:.2f}."
        found.append(
            curves(
                "Acceptance length, measured of checkpoints",
                [steps[place] for place in places],
                [Series("tokens per pass", known, "accent")],
                summary=said,
                dots=True,
            )
        )
    if known := _known(values.get("tokens_per_s")):
        series = [Series("tokens/s", values["tokens_per_s"], "accent")]
        said = f"{words.short(sum(known) / len(known))} on average."
        found.append(curves("Tokens trained per second", steps, series, summary=said, from_zero=True))
    return found


def _known(values: Sequence[float | None] | None) -> list[float]:
    return [value for value in values or () if value is not None]


def _evaluated(said: JSON) -> Evaluated:
    """Also of an evaluation that an older version wrote, which has fewer parts."""
    lossless = said.get("lossless")
    how = "greedy" if not said.get("temperature") else f"sampled at temperature {said['temperature']:g}"
    about = {
        "checkpoint": str(said["checkpoint"]),
        "acceptance length": f"{said['acceptance_length']:.3f} of at most {said['k'] + 1}",
        "95 % interval": _interval(said),
        "asked": f"{said['prompts']:,} prompts, k = {said['k']}, {how}, {said.get('dtype', '')}",
        "drafts": f"{said['drafts']:,}, {said['accepted']:,} of {said['drafted']:,} tokens kept",
        "speed": f"{said['speedup']:.2f} times plain decoding, one request at a time: "
        f"{said['tokens_per_s']:.0f} against {said['plain_tokens_per_s']:.0f} tokens/s",
        "lossless": ""
        if lossless is None
        else f"{said['lossless_prompts']:,} of {said['prompts']:,} answers are those of the target, token for token",
    }
    parts = [("all", {**said, "conversations": said.get("conversations", said["prompts"])})]
    parts += [
        (f"{word} {name}", one)
        for part, word in PARTS.items()
        for name, one in (said.get(part) or {}).items()
        if len(said[part]) > 1 or part == "domains"
    ]
    return Evaluated(
        about={name: value for name, value in about.items() if value},
        kept=[
            Kept(
                name=name,
                length=one["acceptance_length"],
                interval=_interval(one),
                drafts=one["drafts"],
                conversations=one["conversations"],
                shares=one["acceptance_per_position"],
            )
            for name, one in parts
        ],
        positions=len(said["acceptance_per_position"]),
        sweep=[one | {"interval": _interval(one)} for one in said.get("sweep") or ()]
        if len(said.get("sweep") or ()) > 1
        else [],
        warnings=[str(warning) for warning in said.get("warnings") or ()],
    )


def _interval(said: Mapping[str, Any]) -> str:
    found = said.get("interval")
    return f"{found[0]:.2f} – {found[1]:.2f}" if found else ""
