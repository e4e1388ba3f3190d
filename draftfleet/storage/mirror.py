"""Folders of drafters on an object store: the trainer works in a folder of its node, and what is finished is copied.

One subfolder is one thing, a checkpoint or an export: it is fetched whole and put in place in one step.
"""

from __future__ import annotations

import shutil
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any


def upload(client: Any, bucket: str, prefix: str, folder: Path) -> None:
    """Make the store's folder as the local one is: files that differ in size or are newer go up, others are deleted."""
    held = {str(one["Key"])[len(prefix) :]: one for one in _objects(client, bucket, prefix)}
    local = _files(folder)
    for name, path in sorted(local.items()):
        there, here = held.get(name), path.stat()
        if there is None or there["Size"] != here.st_size or there["LastModified"].timestamp() <= here.st_mtime:
            client.upload_file(str(path), bucket, prefix + name)
    for name in held.keys() - local.keys():
        client.delete_object(Bucket=bucket, Key=prefix + name)


def download(client: Any, bucket: str, prefix: str, folder: Path) -> None:
    """Fetch each subfolder that is missing here or differs. One that lacks a file that is here was never finished."""
    held: dict[str, dict[str, int]] = defaultdict(dict)
    for one in _objects(client, bucket, prefix):
        top, slash, name = str(one["Key"])[len(prefix) :].partition("/")
        if slash:
            held[top][name] = int(one["Size"])
    for top, sizes in held.items():
        here = {name: path.stat().st_size for name, path in _files(folder / top).items()}
        if here != sizes and here.keys() <= sizes.keys():
            _fetch(client, bucket, f"{prefix}{top}/", sizes, folder / top)


def _fetch(client: Any, bucket: str, prefix: str, names: dict[str, int], folder: Path) -> None:
    staged = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        for name in names:
            path = staged / name
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, prefix + name, str(path))
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _objects(client: Any, bucket: str, prefix: str) -> list[dict[str, Any]]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [one for page in pages for one in page.get("Contents", ())]


def _files(folder: Path) -> dict[str, Path]:
    """Files below a folder by their relative name. What is hidden is being written."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        name.as_posix(): path for name, path in found.items() if not any(part.startswith(".") for part in name.parts)
    }
