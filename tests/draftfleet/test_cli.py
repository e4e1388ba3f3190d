"""The command line as a stranger meets it: as a process."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import draftfleet
from draftfleet import cli, errors
from draftfleet.flags import FLAGS
from draftfleet.roles import PARTS
from draftfleet.settings import load

Result = subprocess.CompletedProcess[str]
DEADLINE_S = 60

HEAVY = ("torch", "transformers", "celery", "kombu", "redis", "openai", "httpx", "datasets", "pyarrow", "numpy", "rich")

ROLE = """
import signal, sys
from dataclasses import dataclass, field
from pathlib import Path
from draftfleet import errors

@dataclass
class Report:
    prompts: int
    rate: float
    exported: dict
    per_position: tuple = (0.9, 0.75)
    reasons: dict = field(default_factory=dict)
    lossless: bool = True

def succeed(settings, **flags):
    print("progress", flags, file=sys.stderr)
    return Report(prompts=1500, rate=2.0, exported={"vllm": Path(settings.producer.data)})

def repeat_and_return(value):
    def repeat(settings, *args, **flags):
        print(settings.model_dump_json(), file=sys.stderr)
        return value
    return repeat

code, text, fields = repeat_and_return(0), repeat_and_return("queued"), repeat_and_return({})

def wait(settings, **flags):
    print("waiting", file=sys.stderr, flush=True)
    signal.pause()

def needs_a_package(settings, **flags):
    import a_package_nobody_has

def fail(settings, **flags):
    raise getattr(errors, settings.producer.data)("it broke: 7; allowed are 1 and 2")
"""
"""A role of the test's own, put into the table that the command line reads."""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """`draftfleet`, with `produce` led to a function of the module above, named by the first argument."""
    (tmp_path / "a_role.py").write_text(ROLE)
    code = (
        "import sys; from draftfleet import cli; cli.ROLES['produce'] = 'a_role:' + sys.argv.pop(1); "
        "sys.exit(cli.main())"
    )
    return [sys.executable, "-c", code]


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Result]:
    """Run a command line in an empty folder."""

    def start(*args: str, command: list[str] | None = None, **env: str) -> Result:
        return subprocess.run(
            [*(command or [sys.executable, "-m", "draftfleet"]), *args],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)} | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    return start


def test_help_lists_every_verb_and_the_version_is_the_packages(call: Callable[..., Result]) -> None:
    help_ = call("--help")
    version = call("--version")

    assert help_.returncode == 0
    verbs = {line.split()[0] for line in help_.stdout.partition("Commands:")[2].splitlines() if line.strip()}
    assert verbs == {*(verb.split()[0] for verb in cli.ROLES), "fake-server", "health", "settings"}
    assert (version.returncode, version.stdout) == (0, f"draftfleet {draftfleet.__version__}\n")


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["work", "--help"]])
def test_help_imports_nothing_heavy(call: Callable[..., Result], args: list[str]) -> None:
    code = (
        "import sys\n"
        "from draftfleet import cli\n"
        "try: cli.main()\n"
        f"finally: print('heavy:', *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
    )

    result = call(*args, command=[sys.executable, "-c", code])

    assert result.returncode == 0
    assert result.stderr == "heavy:\n"


@pytest.mark.parametrize("verb", cli.ROLES | PARTS)
def test_every_verb_names_a_function_that_is_there(verb: str) -> None:
    module, _, function = (cli.ROLES | PARTS)[verb].partition(":")

    spec = importlib.util.find_spec(module)

    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    functions = {node.name: node.args.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function in functions
    assert functions[function][0].arg == "settings"


def test_a_result_is_one_json_line_on_stdout_and_a_summary_on_stderr(
    call: Callable[..., Result], command: list[str]
) -> None:
    result = call("succeed", "produce", "x.jsonl", "--run", "r1", command=command)

    assert result.returncode == 0
    assert json.loads(result.stdout) == {
        "run": "r1",
        "prompts": 1500,
        "rate": 2.0,
        "exported": {"vllm": "x.jsonl"},
        "per_position": [0.9, 0.75],
        "reasons": {},
        "lossless": True,
    }
    assert result.stdout.count("\n") == 1
    assert [line.split(maxsplit=1) for line in result.stderr.splitlines() if "per position" not in line] == [
        ["progress", "{'progress': False}"],
        ["produced"],
        ["run", "r1"],
        ["prompts", "1,500"],
        ["rate", "2.000"],
        ["exported", "vllm x.jsonl"],
        ["lossless", "yes"],
    ]
    assert "per position  0.900 / 0.750" in result.stderr


@pytest.mark.parametrize(
    "error",
    sorted(
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.DraftfleetError)
    ),
)
def test_an_error_of_ours_is_its_message_and_its_exit_code(
    error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a_role.py").write_text(ROLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.ROLES, "produce", "a_role:fail")

    with pytest.raises(SystemExit) as exit_:
        cli.app(["produce", error])

    assert exit_.value.code == getattr(errors, error).exit_code
    assert capsys.readouterr() == ("", "draftfleet: it broke: 7; allowed are 1 and 2\n")


def test_debug_shows_where_an_error_comes_from(call: Callable[..., Result], command: list[str]) -> None:
    result = call("fail", "--debug", "produce", "DataError", command=command)

    assert result.returncode == 3
    assert "Traceback" in result.stderr
    assert "it broke: 7; allowed are 1 and 2" in result.stderr


def test_a_missing_package_is_named_with_what_brings_it(call: Callable[..., Result], command: list[str]) -> None:
    code = "import sys; from draftfleet import cli; cli.ROLES['train'] = 'a_package_nobody_has.x:y'; cli.main()"

    result = call("train", command=[sys.executable, "-c", code])

    assert result.returncode == 1
    assert result.stderr.startswith("draftfleet: `draftfleet train` needs the package a_package_nobody_has")
    assert "[trainer]" in result.stderr


def test_a_fault_inside_a_role_is_not_taken_for_a_missing_extra(
    call: Callable[..., Result], command: list[str]
) -> None:
    result = call("needs_a_package", "produce", command=command)

    assert "Traceback" in result.stderr
    assert "a_package_nobody_has" in result.stderr
    assert "extra" not in result.stderr


def test_ctrl_c_ends_with_130_and_no_traceback(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # What a shell starts in the background ignores Ctrl-C, and so would its children.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    interpreter, flag, code = command
    child = [interpreter, flag, heard + code, "wait", "produce"]
    process = subprocess.Popen(child, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"

    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 130
    assert rest == ""


def test_a_reader_that_goes_away_is_no_fault() -> None:
    shell = f"{sys.executable} -m draftfleet settings | head -1"

    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=DEADLINE_S, check=True)

    assert result.stderr == ""


def test_a_named_flag_wins_over_set_which_wins_over_the_environment_and_the_file(
    call: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "draftfleet.toml").write_text('run = "file"\nstorage.url = "file"\n[worker]\nconcurrency = 1\n')

    result = call(
        "settings", "--json", "--run", "flag", "--set", "run=set", "--set", "storage.url=set",
        DRAFTFLEET_RUN="env", DRAFTFLEET_STORAGE__URL="env", DRAFTFLEET_WORKER__CONCURRENCY="2",
    )  # fmt: skip

    now = {path: knob["value"] for path, knob in json.loads(result.stdout).items()}
    assert (now["run"], now["storage.url"], now["worker.concurrency"]) == ("flag", "set", 2)


TEXTS = (
    "train",
    "capture-command",
    "pause",
    "resume",
    "cancel",
    "drain",
    "runs priority",
    "runs budget",
    "runs delete",
)
RETURNS = dict.fromkeys(("produce", "evaluate", "export", "continue", "dead revive", "dead export"), "fields")
RETURNS |= dict.fromkeys(TEXTS, "text")
"""What the command line expects of a role: a result, a sentence, or an exit code."""

ARGUMENT = {
    "bench": ["--with", "http://a:1"],
    "continue": ["--max-tokens", "8"],
    "export-data": ["folder"],
    "dead show": ["b05c"],
    "dead export": ["x.jsonl"],
    "runs delete": ["--yes"],
}
"""Where one is required, or a question asked."""

FLAGS_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (
        "--prompts a.jsonl --servers http://a:1,http://b:1-3 --out /tmp/answers --max-tokens 4096 --concurrency 48 "
        "--model m --target t --temperature 0.5 --no-thinking --samples 2",
        {
            "producer.data": "a.jsonl",
            "worker.servers": ["http://a:1", "http://b:1-3"],
            "storage.url": "/tmp/answers",
            "queue.url": None,
            "queue.embedded_dir": "/tmp/answers/.draftfleet",
            "sampling.max_tokens": 4096,
            "worker.concurrency": 48,
            "target.model": "m",
            "target.path": "t",
            "sampling.temperature": 0.5,
            "sampling.thinking": False,
            "sampling.n": 2,
        },
    ),
    "produce": (
        "D --model m --target t --storage s --run r --column c --split-column sc --heldout 0.5 --batch-size 3 "
        "--split sp --subset sub --revision rev --sample 7 --seed 8 --language en,de --language fr "
        "--limit 4 --strict --max-tokens 5 --temperature 0 --no-thinking --priority high --token-budget 6 --samples 3",
        {
            "target.model": "m",
            "target.path": "t",
            "storage.url": "s",
            "run": "r",
            "producer.data": "D",
            "producer.split": "sp",
            "producer.subset": "sub",
            "producer.revision": "rev",
            "producer.sample": 7,
            "producer.seed": 8,
            "producer.languages": ["en", "de", "fr"],
            "producer.column": "c",
            "producer.split_column": "sc",
            "producer.heldout": 0.5,
            "producer.batch_size": 3,
            "producer.limit": 4,
            "producer.strict": True,
            "producer.priority": "high",
            "producer.token_budget": 6,
            "sampling.max_tokens": 5,
            "sampling.temperature": 0,
            "sampling.thinking": False,
            "sampling.n": 3,
        },
    ),
    "presets": ("--run r", {"run": "r"}),
    "work": (
        "--servers http://a:1,http://b:2 --servers http://c:3 --concurrency 6 --dialect vllm",
        {
            "worker.servers": ["http://a:1", "http://b:2", "http://c:3"],
            "worker.concurrency": 6,
            "worker.dialect": "vllm",
        },
    ),
    "train": (
        "--max-steps 8 --lr 0.5 --drafter d",
        {"trainer.max_steps": 8, "trainer.lr": 0.5, "trainer.drafter": "d"},
    ),
    "trainer": ("--device cpu", {"trainer.device": "cpu"}),
    "evaluate": (
        "--k 1,12,2 --prompts 7 --temperature 0.5",
        {
            "evaluation.k": 12,
            "evaluation.sweep": [1, 2],
            "evaluation.prompts": 7,
            "evaluation.temperature": 0.5,
        },
    ),
    "flower": ("--address 127.0.0.2 --port 0", {"flower.address": "127.0.0.2", "flower.port": 0}),
}


OF_THEIR_OWN = {"join", "generate"}
"""Verbs that bring knobs along: from a run, or those of a fleet in one folder."""


@pytest.mark.parametrize("verb", FLAGS_OF)
def test_every_flag_reaches_its_knob(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_role.py").write_text(ROLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.ROLES, verb, f"a_role:{RETURNS.get(verb, 'code')}")
    args, wanted = FLAGS_OF[verb]

    with pytest.raises(SystemExit) as exit_:
        cli.app([*verb.split(), *shlex.split(args)])

    said = capsys.readouterr().err
    assert exit_.value.code == 0, said
    settings = json.loads(said.splitlines()[0])
    assert {path: _at(settings, path) for path in wanted} == wanted


@pytest.mark.parametrize(
    ("words", "data"), [(["a.jsonl", "b.csv"], ["a.jsonl", "b.csv"]), (["a.jsonl"], "a.jsonl")], ids=["two", "one"]
)
@pytest.mark.parametrize("verb", ["produce", "doctor"])
def test_several_files_are_one_list(
    verb: str,
    words: list[str],
    data: object,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a_role.py").write_text(ROLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.ROLES, verb, "a_role:fields")

    with pytest.raises(SystemExit):
        cli.app([verb, *words, "--model", "m"])

    settings = json.loads(capsys.readouterr().err.splitlines()[0])
    assert settings["producer"]["data"] == data


@pytest.mark.parametrize("verb", sorted({*cli.ROLES} - OF_THEIR_OWN))
def test_a_flag_that_is_not_given_leaves_its_knob_to_the_file(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_role.py").write_text(ROLE)
    (tmp_path / "draftfleet.toml").write_text(
        "[producer]\nstrict = true\n[sampling]\nthinking = true\n[worker]\nservers = ['http://a:1']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.ROLES, verb, f"a_role:{RETURNS.get(verb, 'code')}")

    with pytest.raises(SystemExit):
        cli.app([*verb.split(), *ARGUMENT.get(verb, [])])

    assert json.loads(capsys.readouterr().err.splitlines()[0]) == load().model_dump(mode="json")


def test_no_flag_is_left_without_a_test() -> None:
    brought = {"queue.url", "queue.embedded_dir"}  # by `generate`, which has no flag for them

    assert {path for _, wanted in FLAGS_OF.values() for path in wanted} - brought == {
        *FLAGS.values(),
        "evaluation.sweep",
    }


def _at(settings: dict[str, Any], path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = value[name]
    return value


def test_settings_prints_a_settings_file_with_the_values_that_hold(call: Callable[..., Result], tmp_path: Path) -> None:
    result = call("settings", "--set", "worker.concurrency=7", "--set", 'worker.servers=["http://a:1"]')

    (tmp_path / "again.toml").write_text(result.stdout)
    assert tomllib.loads(result.stdout)["worker"]["concurrency"] == 7
    said = load(flags={"worker.concurrency": 7, "worker.servers": ["http://a:1"]})
    assert load(tmp_path / "again.toml").model_dump() == said.model_dump()


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_settings_never_shows_a_secret(call: Callable[..., Result], form: list[str]) -> None:
    result = call(
        "settings", *form, "--storage", "s3://someone:hush@host/bucket",
        DRAFTFLEET_QUEUE__URL="redis://:hush@localhost/0",
        DRAFTFLEET_WORKER__API_KEY="hush",
        DRAFTFLEET_FLOWER__PASSWORD="hush",
        DRAFTFLEET_WORKER__SERVERS='["http://someone:hush@host:1"]',
    )  # fmt: skip

    assert result.returncode == 0
    assert result.stdout.count("(secret)") == 3
    assert result.stdout.count("***@host") == 2
    assert "hush" not in result.stdout + result.stderr


def test_a_typo_is_told_with_its_path_and_the_nearest_key(call: Callable[..., Result]) -> None:
    result = call("settings", "--set", "worker.concurency=7")

    assert result.returncode == 2
    assert result.stderr == "draftfleet: settings: unknown key worker.concurency; did you mean worker.concurrency?\n"
