"""An object store that speaks S3, as the shared storage: a put only if absent is a PUT with `If-None-Match: *`.

Whoever puts writes its mark beside the object. After an answer that leaves open who won (a connection that broke after
the write, a retry that meets its own object, two puts at the same time) the mark in the store tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from draftfleet.errors import StorageError, StorageUnreadable, StorageUnsafe, StorageUnwritable
from draftfleet.storage import mirror

MARK = "draftfleet-writer"
"""Metadata of an object: a random word of the put that wrote it."""

PART_BYTES = 64 * 1024 * 1024
"""Larger objects go in parts of this size. S3 wants at least 5 MiB, and 10,000 parts at most."""

TRIES = 6
"""Of each request, by botocore: with back-off on 503 SlowDown, other 5xx, resets and timeouts."""

BODY_TRIES = 3
"""Of an object that broke off while it was read, which botocore does not try again."""

CONFLICTS = 5
"""Looks at an object that another writer is putting just now (409), or that was deleted between two looks."""

NO_KEY = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, ProfileNotFound)
ABSENT = {"NoSuchKey", "404", "NotFound"}
TAKEN = {"PreconditionFailed", "412"}
CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}
CONDITION_UNKNOWN = {"NotImplemented", "501"}


class S3Storage:
    """`s3://BUCKET/PREFIX`. The key is found as the AWS tools find it: environment, profile, or the machine's role."""

    def __init__(
        self, url: str, *, endpoint_url: str | None = None, local_dir: str | None = None, part_bytes: int = PART_BYTES
    ) -> None:
        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        if not self._bucket or "@" in self._bucket:
            raise StorageError(f"storage.url = s3://{self._bucket.partition('@')[2]}: write it as s3://BUCKET/PREFIX.")
        self.url = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self._local_dir = Path(local_dir).expanduser().absolute() if local_dir else None
        self._part_bytes = part_bytes
        self._is_proven = False
        self._undecided: dict[tuple[str, str], str] = {}
        self._client = self._connect(endpoint_url)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        attempt = path, hashlib.sha256(data).hexdigest()
        mark = self._undecided.get(attempt) or uuid.uuid4().hex
        self._undecided[attempt] = mark  # stays if we leave without an answer: the same put asked again knows its own
        for number in range(CONFLICTS):
            won = self._put_once(path, data, mark)
            if won is not None:
                del self._undecided[attempt]
                return won
            time.sleep(0.1 * 2**number)
        raise StorageUnwritable(
            f"could not write {self.url}/{path}: others are putting and deleting it again and again."
        )

    def put_in_order(self, files: Sequence[tuple[str, bytes]]) -> int:
        for number, (path, data) in enumerate(files):
            if not self.put_if_absent(path, data):
                return number
        return len(files)

    def put(self, path: str, data: bytes) -> None:
        with self._faults("write", path, StorageUnwritable):
            self._send(path, data, uuid.uuid4().hex)

    def read(self, path: str) -> bytes:
        with self._faults("read", path, StorageUnreadable):
            for _ in range(BODY_TRIES - 1):
                body = self._body(path)
                with contextlib.suppress(HTTPClientError, IncompleteReadError):
                    return body.read()
            return self._body(path).read()

    def exists(self, path: str) -> bool:
        with self._faults("read", path, StorageUnreadable):
            return self._mark(path) is not None

    def list(self, folder: str) -> Iterator[str]:
        yield from self.sizes(folder)

    def sizes(self, folder: str) -> dict[str, int]:
        start = len(self._folder(folder))
        found = {str(one["Key"])[start:]: int(one["Size"]) for one in self._listed(folder, "Contents")}
        return {name: size for name, size in found.items() if name and not name.startswith(".")}

    def folders(self, folder: str = "") -> Iterator[str]:
        start = len(self._folder(folder))
        for one in self._listed(folder, "CommonPrefixes"):
            if not (name := str(one["Prefix"])[start:-1]).startswith("."):
                yield name

    def delete(self, path: str) -> None:
        with self._faults("delete", path, StorageUnwritable), contextlib.suppress(FileNotFoundError):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(path))

    def delete_folder(self, path: str) -> None:
        with self._faults("delete", path, StorageUnwritable):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._folder(path)
            )
            for page in pages:
                for one in page.get("Contents", ()):
                    self._client.delete_object(Bucket=self._bucket, Key=one["Key"])

    def rename(self, path: str, new_path: str) -> None:
        source = {"Bucket": self._bucket, "Key": self._key(path)}
        with self._faults("move", path, StorageUnwritable):
            self._client.copy_object(Bucket=self._bucket, Key=self._key(new_path), CopySource=source)
            self._client.delete_object(**source)

    def free_bytes(self) -> int | None:
        return None

    def expect_mark(self) -> None:
        """It was probed: a key or bucket that is refused from now on is waited for, as a folder that is away is."""
        self._is_proven = True

    def local(self, path: str) -> Path:
        if self._local_dir is None:
            raise StorageError(
                f"{self.url} is no folder, and a drafter needs one while it is trained or exported: set "
                "storage.local_dir to a folder of this node. What is finished there is copied to the store."
            )
        return self._local_dir / path

    def share(self, path: str) -> None:
        with self._faults("write", path, StorageUnwritable):
            mirror.upload(self._client, self._bucket, self._folder(path), self.local(path))

    def fetch(self, path: str) -> None:
        with self._faults("read", path, StorageUnreadable):
            mirror.download(self._client, self._bucket, self._folder(path), self.local(path))

    def _connect(self, endpoint_url: str | None) -> Any:
        """A client. Clients may be shared by threads; making one asks nobody anything."""
        if endpoint_url and (not endpoint_url.startswith(("http://", "https://")) or urlsplit(endpoint_url).username):
            raise StorageError(
                "storage.endpoint_url must be http://HOST:PORT or https://HOST:PORT, without a name or password: "
                "the key comes from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            )
        is_elsewhere = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        config = Config(
            connect_timeout=10,
            read_timeout=30,
            tcp_keepalive=True,
            max_pool_connections=64,
            retries={"mode": "standard", "total_max_attempts": TRIES},
            # Outside AWS a bucket is seldom a host name, and not every store knows the newer checksums.
            s3={"addressing_style": "path" if is_elsewhere else "auto"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            session = Session()
            region = session.region_name or "us-east-1"
            return session.client("s3", endpoint_url=endpoint_url or None, region_name=region, config=config)
        except (BotoCoreError, ValueError) as error:
            raise StorageError(f"no client for {self.url}: {error}. Correct the AWS settings of this node.") from None

    def _put_once(self, path: str, data: bytes, mark: str) -> bool | None:
        """Whether this put won; None if that is still open. Raises as put_if_absent does."""
        with self._faults("write", path, StorageUnwritable):
            try:
                self._send(path, data, mark, IfNoneMatch="*")
                return True
            except ClientError as error:
                if (code := _code(error)) in CONDITION_UNKNOWN:
                    raise StorageUnsafe(
                        f"{self.url} does not know a put only if absent ({code}): two workers could overwrite each "
                        "other's samples. Use a store with conditional writes (docs/storage.md)."
                    ) from error
                if code not in TAKEN | CONFLICT | {"NoSuchUpload"} and not _passes(error):
                    raise
                return self._outcome(path, mark, error)
            except BotoCoreError as error:
                if isinstance(error, NO_KEY):
                    raise
                return self._outcome(path, mark, error)

    def _outcome(self, path: str, mark: str, error: Exception) -> bool | None:
        """After an error that does not tell: whose object is there. Raises the error if none is and none should be."""
        found = self._mark(path)
        if found is not None:
            return found == mark
        if isinstance(error, ClientError) and _code(error) in TAKEN | CONFLICT:
            return None
        raise error

    def _send(self, path: str, data: bytes, mark: str, **condition: str) -> None:
        where = {"Bucket": self._bucket, "Key": self._key(path)}
        if len(data) <= self._part_bytes:
            self._client.put_object(**where, Body=data, Metadata={MARK: mark}, **condition)
            return
        upload = self._client.create_multipart_upload(**where, Metadata={MARK: mark})["UploadId"]
        try:
            starts = range(0, len(data), self._part_bytes)
            parts = [
                {
                    "PartNumber": number,
                    "ETag": self._client.upload_part(
                        **where, UploadId=upload, PartNumber=number, Body=data[start : start + self._part_bytes]
                    )["ETag"],
                }
                for number, start in enumerate(starts, start=1)
            ]
            self._client.complete_multipart_upload(
                **where, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
            )
        except (ClientError, BotoCoreError):
            with contextlib.suppress(ClientError, BotoCoreError):  # the first error says it
                self._client.abort_multipart_upload(**where, UploadId=upload)
            raise

    def _body(self, path: str) -> Any:
        return self._client.get_object(Bucket=self._bucket, Key=self._key(path))["Body"]

    def _mark(self, path: str) -> str | None:
        """Who wrote an object: "" where it does not say; None if it is not there."""
        try:
            head = self._client.head_object(Bucket=self._bucket, Key=self._key(path))
        except ClientError as error:
            if _code(error) in ABSENT:
                return None
            raise
        return str(head.get("Metadata", {}).get(MARK, ""))

    def _listed(self, folder: str, what: str) -> Iterator[dict[str, Any]]:
        with self._faults("list", folder, StorageUnreadable):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._folder(folder), Delimiter="/"
            )
            for page in pages:
                yield from page.get(what, ())

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}".lstrip("/")

    def _folder(self, path: str) -> str:
        key = self._key(path).strip("/")
        return f"{key}/" if key else ""

    @contextmanager
    def _faults(self, verb: str, path: str, passing: type[StorageError]) -> Generator[None]:
        """What S3 or the network raise, as one of ours: `passing` where waiting may help."""
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            code = _code(error)
            if code in ABSENT:
                raise FileNotFoundError(f"{self.url}/{path}") from None
            said = f"could not {verb} {self.url}/{path}: {_text(error)}."
            if isinstance(error, NO_KEY) or code == "NoSuchBucket" or _status(error) in (401, 403):
                kind = passing if self._is_proven else StorageError
                raise kind(f"{said} {_refused(code, self._bucket)}") from error
            if isinstance(error, BotoCoreError) or _passes(error):
                raise passing(f"{said} Nothing was lost, work goes on by itself once the store answers.") from error
            raise StorageError(f"{said} Correct storage.url or storage.endpoint_url, or mend the store.") from error


def _code(error: Exception) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def _status(error: Exception) -> int:
    metadata = error.response.get("ResponseMetadata", {}) if isinstance(error, ClientError) else {}
    return int(metadata.get("HTTPStatusCode", 0))


def _passes(error: ClientError) -> bool:
    """Whether the same request may succeed later: busy, broken, full."""
    return _status(error) >= 500 or _status(error) in (408, 429) or _code(error) in ("RequestTimeout", "NoSuchUpload")


def _text(error: Exception) -> str:
    text = str(error).rstrip(".")
    return f"{_code(error)}, {text}" if _code(error) and _code(error) not in text else text


def _refused(code: str, bucket: str) -> str:
    if code == "NoSuchBucket":
        return f"Make the bucket {bucket}, or correct storage.url and storage.endpoint_url."
    return (
        "Give this node a key that may read, write, list and delete there: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, a profile, or the machine's role."
    )
