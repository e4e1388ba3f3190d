"""A real inference server for one machine without a GPU: `transformers serve`, as a child process.

Your own servers are yours to start; the demo starts one so that it needs nothing but this repository.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from draftfleet import children
from draftfleet.errors import ServerError
from draftfleet.ports import free_port

SIZES = ["--cb-num-blocks", "512", "--cb-max-batch-tokens", "1024"]
"""Of its cache and its batches; left to itself it measures the memory first, for 20 s."""


class InferenceServer:
    """Serves `model` under that very name. Loading goes on after entry; `is_ready` tells when it is over."""

    def __init__(self, model: str, log: Path) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = ["serve", model, "--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"]
        self._argv = [
            sys.executable,
            "-m",
            "transformers.cli.transformers",
            *arguments,
            "--continuous-batching",
            *SIZES,
        ]
        self._child: subprocess.Popen[bytes] | None = None
        self._answered = False

    def __enter__(self) -> Self:
        self._child = children.spawn(self._argv, log=self.log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child is not None
        children.stop(self._child, grace_s=5)

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def is_ready(self) -> bool:
        """Whether it answers. Once it did, it is not asked again."""
        if not self._answered:
            self._answered = self._answers()
        return self._answered

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def check(self) -> None:
        """Raises ServerError, with the end of its log, if it has ended."""
        assert self._child is not None
        if (code := self._child.poll()) is not None:
            raise ServerError(
                f"`transformers serve` ended with code {code}; its log ({self.log}) says:\n"
                f"{children.last_lines(self.log)}"
            )
