"""The dialect of the page, as it is written there, under the contract: a server of SGLang's shape speaks it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftfleet.errors import DraftfleetError
from draftfleet.settings import Sampling
from draftfleet.testing import FakeServer
from draftfleet.tokens import TargetTokenizer
from workers.dialects import Ask

ROOT = Path(__file__).parents[2]
[BLOCK] = re.findall(
    r"^```python module\n(.*?)^```$", (ROOT / "docs/add-a-dialect.md").read_text(), re.DOTALL | re.MULTILINE
)
CONTRACT = runpy.run_path(str(ROOT / "tests/contracts/dialects/test_contract.py"))
AROUND = runpy.run_path(str(ROOT / "tests/contracts/dialects/conftest.py"))

OF_THE_TABLE = {"test_the_suite_leaves_no_dialect_out", "test_a_cut_answer_is_gone_on_with_from_its_exact_ids"}
"""The first is about `DIALECTS`; the second asks whether a dialect goes on by its name."""

globals().update(
    {name: test for name, test in CONTRACT.items() if name.startswith("test_") and name not in OF_THE_TABLE}
)
tokenizer, fake = AROUND["tokenizer"], AROUND["fake"]


@pytest.fixture
def dialect() -> Any:
    module = ModuleType("name")
    exec(compile(BLOCK, "docs/add-a-dialect.md", "exec"), vars(module))
    return module


@pytest.fixture
def server(dialect: Any, fake: FakeServer, tokenizer: TargetTokenizer) -> Any:
    fake.change(shape="sglang", model="tiny", max_model_len=None, tokens=48, faults=[])
    return CONTRACT["Server"](dialect, "sglang", fake, tokenizer)


def test_a_knob_that_the_server_would_drop_is_refused(dialect: Any) -> None:
    ask = Ask(model="tiny", messages=[{"role": "user", "content": "?"}], sampling=Sampling(min_p=0.1))

    with pytest.raises(DraftfleetError, match="NAME ignores it"):
        dialect.request(ask)


def test_it_is_recognized_by_what_it_says_of_its_models(dialect: Any) -> None:
    assert dialect.recognizes({"data": [{"id": "tiny", "owned_by": "name"}]}, "", {})
    assert not dialect.recognizes({"data": [{"id": "tiny", "owned_by": "vllm"}]}, "", {})
