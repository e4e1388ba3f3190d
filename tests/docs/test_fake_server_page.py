"""The page of the fake server is held against it: its tables name all there is, and its examples run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import get_args
from urllib.request import Request, urlopen

import pytest

from draftfleet.testing import Behaviour, FakeServer, Fault, command
from draftfleet.testing.behaviour import OF_THE_SERVER, Kind, Shape

PAGE = (Path(__file__).parents[2] / "docs/fake-server.md").read_text()
BASH = "\n".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
ORDERS = [line for line in BASH.splitlines() if line.startswith("curl") and " -d " in line]


def rows(header: str) -> list[list[str]]:
    """The cells of a table, without its header."""
    lines = PAGE.partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_table_of_settings_names_every_one_with_its_default_and_meaning() -> None:
    table = {name.strip("`"): (default, meaning) for name, default, meaning in rows("| setting | default | meaning |")}

    assert list(table) == list(Behaviour.model_fields)
    for name, field in Behaviour.model_fields.items():
        default, meaning = table[name]
        assert meaning == field.description
        match field.default:
            case None:
                assert default == "unset", name
            case bool():
                assert default == str(field.default).lower()
            case int() | float():
                assert float(default.replace(",", "")) == field.default
            case str():
                assert default.strip("`") == field.default
            case _:
                assert default == "none", name


def test_the_tables_of_faults_and_shapes_name_every_one() -> None:
    kinds = [row[0].strip("`") for row in rows("| kind | what a client sees |")]
    shapes = [row[0].strip("`") for row in rows("| shape | reasoning |")]

    assert sorted(kinds) == sorted(get_args(Kind))
    assert shapes == list(get_args(Shape))
    for name in {*Fault.model_fields, *OF_THE_SERVER} - {"kind", "seen", "done"}:
        assert f"`{name}`" in PAGE


def test_the_settings_file_is_one_that_seven_servers_take(tmp_path: Path) -> None:
    text = BASH.partition("<<'EOF'\n")[2].partition("EOF\n")[0]
    (tmp_path / "fake.toml").write_text(text)
    assigned = re.findall(r"--config fake\.toml --set (\S+)", BASH)

    settings = command.read({}, config=tmp_path / "fake.toml", text=None, assigned=assigned)
    all_ = command.behaviours(settings, 7)

    assert [one.speed for one in all_] == [1, 1, 1, 0.5, 1, 1, 1]
    assert [one.load_s for one in all_] == [0, 0, 0, 0, 0, 60, 0]
    assert {one.faults[0].share for one in all_} == {0.01}


@pytest.mark.parametrize("line", ORDERS)
def test_every_order_is_taken(line: str) -> None:
    words = shlex.split(line)
    path, body = words[1].removeprefix("localhost:9000"), words[3]

    with FakeServer() as server, urlopen(Request(server.url + path, body.encode()), timeout=30) as response:
        settings = json.loads(response.read())

    assert settings.keys() == Behaviour.model_fields.keys()
    assert settings != Behaviour().model_dump() or body == '{"faults": []}'


def test_the_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

    exec(compile(block, "docs/fake-server.md", "exec"), {})

    assert re.fullmatch(r"http://127\.0\.0\.1:\d+ 0\.0\n", capsys.readouterr().out)
