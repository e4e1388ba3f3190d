"""How Redis is reached: the address with its password, the TLS that goes with it, and what of both may be shown.

redis-py and kombu get the same address and the same TLS from here. Without it kombu 5.7 would check no certificate.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import redis
from redis.exceptions import NoPermissionError

from draftfleet import embedded, redaction
from draftfleet.errors import QueueError, QueueRefused, SettingsError
from draftfleet.settings import Queue, Settings

ADDRESS_RULE = (
    "write it as redis://user:password@host:6379/0, or rediss:// with TLS; in a password, write : / @ as %3A %2F %40, "
    "or put it as it is into queue.password_file"
)
REFUSED_SCHEMES = {
    "sentinel": "Redis Sentinel is not supported: name the primary itself, or an address that follows it",
    "unix": "a Redis behind a Unix socket is not supported: let it listen on loopback",
}


def address(settings: Settings) -> str:
    """`queue.url` with `queue.password`, else the address of the embedded Valkey.

    Raises SettingsError if it is no address, QueueError if there is neither.
    """
    knobs = settings.queue
    if knobs.url is not None:
        url = _with_password(knobs, _parts(knobs.url.get_secret_value()))
    elif found := embedded.address(knobs.embedded_dir):
        url = found
    else:
        raise QueueError(
            f"no Redis: queue.url is not set and no embedded Valkey was started in {knobs.embedded_dir}. "
            "Run `draftfleet up`, or set queue.url = redis://user:password@host:6379/0."
        )
    redaction.remember([url])
    return url


def tls(settings: Settings) -> dict[str, Any] | None:
    """TLS options by the names that redis-py and kombu share; None without TLS. Raises SettingsError.

    The certificate must be signed by `queue.ca_file`, else by an authority that this machine trusts, and name the host.
    """
    knobs = settings.queue
    files = {"ca_file": knobs.ca_file, "cert_file": knobs.cert_file, "key_file": knobs.key_file}
    if not address(settings).startswith("rediss://"):
        if given := [f"queue.{name}" for name, path in files.items() if path]:
            raise SettingsError(f"{' and '.join(given)} is for TLS, and queue.url has none: begin it with rediss://.")
        return None
    for name, path in files.items():
        if path and not Path(path).is_file():
            raise SettingsError(f"queue.{name} = {path} is not there: name a PEM file.")
    if bool(knobs.cert_file) != bool(knobs.key_file):
        raise SettingsError("queue.cert_file and queue.key_file go together: a client's certificate needs its key.")
    options = {"ssl_ca_certs": knobs.ca_file, "ssl_certfile": knobs.cert_file, "ssl_keyfile": knobs.key_file}
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True} | {k: v for k, v in options.items() if v}


def refusal(error: Exception, settings: Settings) -> QueueRefused | None:
    """What is wrong for good, in words: waiting does not mend a certificate. None if it may pass."""
    url = address(settings)
    where, said = shown(url), redaction.redact(str(error))
    if isinstance(error, redis.AuthenticationError):
        return QueueRefused(f"Redis at {where} refused the login: {said}. Check queue.url.")
    if isinstance(error, NoPermissionError):
        return QueueRefused(f"Redis at {where} lets this user do too little: {said}. Compare docs/security.md.")
    if "CERTIFICATE_" not in said and (options := tls(settings)):
        said = _said_by_tls(url, options) or said
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return QueueRefused(
            f"Redis at {where} showed a certificate that is not trusted: {said}. Set queue.ca_file to the certificate "
            "of the authority that signed it, and name the host as the certificate does."
        )
    if "CERTIFICATE_REQUIRED" in said or "HANDSHAKE_FAILURE" in said:
        return QueueRefused(
            f"Redis at {where} wants a client's certificate: {said}. Set queue.cert_file and queue.key_file."
        )
    return None


def _said_by_tls(url: str, options: dict[str, Any]) -> str | None:
    """Why the other side breaks TLS off, if it does within a second.

    With TLS 1.3 a server refuses a client's certificate after the handshake. Who writes meanwhile, as redis-py does,
    may find the connection closed and the reason lost; who only reads is told.
    """
    parts = urlsplit(url)
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if certificate := options.get("ssl_certfile"):
        context.load_cert_chain(certificate, options.get("ssl_keyfile"))
    try:
        with (
            socket.create_connection((str(parts.hostname), parts.port or 6379), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname) as secured,
        ):
            secured.settimeout(1)
            secured.recv(1)
    except ssl.SSLError as error:
        return str(error)
    except OSError:  # also the second that is over: there is nothing to be told
        pass
    return None


def refuse_cluster(client: redis.Redis, url: str) -> None:
    """Raises QueueRefused. A cluster keeps keys apart that one script or one BRPOP of ours names together."""
    try:
        info: Any = client.info("cluster")
    except redis.ResponseError:  # a user without INFO
        return
    if info.get("cluster_enabled"):
        raise QueueRefused(f"Redis at {shown(url)} is a cluster, which is not supported: use a single Redis.")


def shown(url: str) -> str:
    """Host and port, and whether TLS is spoken: one that does not speak it stays silent."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}{' (TLS)' if parts.scheme == 'rediss' else ''}"


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:  # its text may quote the password
        raise SettingsError(f"queue.url is no address of a Redis: {ADDRESS_RULE}.") from None
    if hint := REFUSED_SCHEMES.get(parts.scheme):
        raise SettingsError(f"queue.url begins with {parts.scheme}://: {hint} (docs/security.md).")
    database = parts.path.strip("/")
    if parts.scheme not in ("redis", "rediss") or not is_address or not (database or "0").isdigit():
        raise SettingsError(f"queue.url is no address of a Redis: {ADDRESS_RULE}.")
    if parts.query or parts.fragment:
        raise SettingsError(
            "queue.url has options behind a ? or #: leave them out. TLS is set by queue.ca_file, queue.cert_file and "
            "queue.key_file; a certificate is always checked."
        )
    return parts


def _with_password(knobs: Queue, parts: SplitResult) -> str:
    if knobs.password is None:
        return parts.geturl()
    if parts.password:
        raise SettingsError("queue.url has a password, and queue.password is set too: leave one of them out.")
    login = f"{parts.username or ''}:{quote(knobs.password.get_secret_value(), safe='')}"
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{login}@{host}").geturl()
