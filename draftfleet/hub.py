"""Uploading a folder to the Hugging Face Hub, or to the hub that HF_ENDPOINT names.

The token comes from the environment alone, HF_TOKEN: not from a flag, which everybody on a machine can read, and not
from a file that another program left. It is never shown.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftfleet.errors import HubError
from draftfleet.redaction import redact, remember

TOKEN = "HF_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`revision` is a branch; None is the main one."""

    repo: str
    private: bool = False
    revision: str | None = None
    kind: Literal["dataset", "model"] = "dataset"


class Hub:
    """Raises HubError in all of its methods."""

    def __init__(self, place: Place) -> None:
        token = os.environ.get(TOKEN, "").strip()
        if not token:
            raise HubError(
                f"--push-to-hub {place.repo}: {TOKEN} is not set. Make a token that may write at "
                "https://huggingface.co/settings/tokens and put it into the environment."
            )
        if place.repo.count("/") != 1:
            raise HubError(f"--push-to-hub {place.repo}: name the owner, too, as in ORG/NAME.")
        remember([token])
        from huggingface_hub import HfApi  # noqa: PLC0415  half a second of imports

        self._place = place
        self._api: Any = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
        self._has_repo = False
        self._has_revision = False

    def check(self, *, overwrite: bool) -> None:
        """Before hours of work: the token is known, and nothing of the same name is there that may not be replaced."""
        from huggingface_hub import errors  # noqa: PLC0415

        place = self._place
        with self._told():
            self._api.whoami()
            try:
                self._api.repo_info(place.repo, repo_type=place.kind, revision=place.revision)
                self._has_repo = self._has_revision = True
            except errors.RevisionNotFoundError:
                self._has_repo = True
            except errors.RepositoryNotFoundError:
                pass
        if self._has_revision and not overwrite:
            raise HubError(
                f"{self._name} is there already: use another name or --revision, or --overwrite to replace what is in "
                "it (what was there stays in its history)."
            )

    def push(self, folder: Path, message: str) -> str:
        """Upload the folder as one commit, and return its address. Files that were there and are not in it go."""
        place = self._place
        with self._told(after=f" The export is whole and in {folder}: once this is mended, run it with --overwrite."):
            if not self._has_repo:
                self._api.create_repo(place.repo, repo_type=place.kind, private=place.private)
            if place.revision is not None and not self._has_revision:
                self._api.create_branch(place.repo, repo_type=place.kind, branch=place.revision, exist_ok=True)
            commit = self._api.upload_folder(
                repo_id=place.repo,
                repo_type=place.kind,
                folder_path=folder,
                revision=place.revision,
                commit_message=message,
                delete_patterns="*" if self._has_repo else None,
            )
        return str(commit.commit_url)

    @property
    def _name(self) -> str:
        at = f", revision {self._place.revision}," if self._place.revision else ""
        return f"{self._place.repo}{at} on {self._api.endpoint}"

    @contextmanager
    def _told(self, after: str = "") -> Generator[None]:
        """What the hub or the way to it said, as one error of ours."""
        try:
            yield
        except Exception as error:  # what the client, its HTTP library and its uploader raise has no common root
            status = getattr(getattr(error, "response", None), "status_code", None)
            raise HubError(f"{_what(status, self._name)} ({redact(_first_line(error))}).{after}") from None


def _what(status: int | None, name: str) -> str:
    match status:
        case 401:
            return f"{name}: the hub does not know the token in {TOKEN}: it is mistyped, expired or revoked"
        case 403:
            return f"{name}: the token in {TOKEN} may not write there: give it the right to, or use a name of your own"
        case 409:
            return f"{name}: it is there already, or somebody else is changing it: try again, or use another name"
        case None:
            return f"{name} cannot be reached: see the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        case _:
            return f"{name}: the hub answered {status}: try again later"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
