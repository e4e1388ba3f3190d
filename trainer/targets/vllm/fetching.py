"""One request, and the file that its answer names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from draftfleet.errors import Mismatch
from trainer.targets.vllm import states
from trainer.targets.vllm.servers import Server, Servers
from trainer.targets.vllm.spool import Spool, is_whole
from trainer.targets.vllm.states import Form

FILE_S = 60.0
"""After an answer, how long its file may take to appear and be whole. The server is writing it already."""

GREEDY = {"temperature": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Whatever the defaults of the model are: the token that comes is the one of the largest logit."""


async def states_of(
    servers: Servers, server: Server, spool: Spool, *, ids: Tensor, form: Form, request: str
) -> tuple[Path, int | None]:
    """The checked file of a row's states, and the token that the server would go on with. Raises ServerError."""
    body = {"model": form.model, "prompt": ids.tolist(), "max_tokens": 1, "return_token_ids": True, **GREEDY}
    answer = await servers.complete(server, body, request)
    file = await _whole_file(spool, server, answer)
    try:
        states.check(file, ids, form)
    except Mismatch:
        spool.remove(file)
        raise
    return file, _next_token(answer)


async def _whole_file(spool: Spool, server: Server, answer: Mapping[str, Any]) -> Path:
    said: object = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
    if not isinstance(said, str):
        raise Mismatch(
            f"{server.url} answers without kv_transfer_params.hidden_states_path: it serves the model, but has no "
            "connector for hidden states"
        )
    file, until = spool.find(said), time.monotonic() + FILE_S
    while time.monotonic() < until:
        with suppress(FileNotFoundError):
            if is_whole(file):
                return file
        await asyncio.sleep(0.01)
    raise states.Torn(
        f"{server.url} says that it wrote {said}, and {file} is not there, or not whole, after {FILE_S:.0f} s: "
        "capture.folder must be the folder that is the server's shared_storage_path, on a file system that both see, "
        "and its use_synchronization_lock must be on, as it is by default"
    )


def _next_token(answer: Mapping[str, Any]) -> int | None:
    choices = cast(list[dict[str, Any]], answer.get("choices") or [{}])
    ids = choices[0].get("token_ids") or []
    return int(ids[0]) if ids else None
