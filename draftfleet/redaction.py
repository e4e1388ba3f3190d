"""What no log, report or error text may show: the values of secret settings, and the login in any address.

`draftfleet.settings.load` tells it the secrets of the process. Text from elsewhere, such as the body of a server's
answer or the words of a library's error, may quote them: it goes through `redact` before anybody sees or keeps it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable
from urllib.parse import quote, quote_plus, unquote, urlsplit

HIDDEN = "***"
SHORTEST = 6
"""A shorter secret is not looked for: it would blot out parts of ordinary words."""

_LOGIN = re.compile(r"(?<=://)[^\s\"'<>]*@")
_TOKEN = re.compile(r"(?i)\b(bearer|authorization\W{1,4}basic)\s+[A-Za-z0-9._~+/=-]{6,}")

_ANSWER = re.compile(r""":\s+(['"]).*\1$""", re.DOTALL)

_lock = threading.Lock()
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None


def remember(secrets: Iterable[str]) -> None:
    """Hide these from now on, in every form in which they may be written. Of an address, its password."""
    global _pattern  # noqa: PLW0603  one set for the process, as there is one standard error
    with _lock:
        before = len(_known)
        for secret in secrets:
            _known.update(form for form in _forms(_password(secret)) if len(form) >= SHORTEST)
        if len(_known) > before:
            _pattern = re.compile("|".join(re.escape(one) for one in sorted(_known, key=len, reverse=True)))


def redact(text: str) -> str:
    """The text without secrets: known ones, logins in addresses, and bearer tokens."""
    if "://" in text:
        text = _LOGIN.sub(f"{HIDDEN}@", text)
    if _pattern is not None:
        text = _pattern.sub(HIDDEN, text)
    return _TOKEN.sub(rf"\1 {HIDDEN}", text)


def without_answer(error: str) -> str:
    """The text of a ServerError without what the server answered: that stands at its end, and may quote a prompt."""
    return _ANSWER.sub("", error)


class Formatter(logging.Formatter):
    """A log line, its traceback included, without secrets. Every handler of this product has it."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _password(secret: str) -> str:
    """Of `redis://user:password@host` the password; anything else is secret as a whole."""
    if "://" not in secret:
        return secret
    _, at, _ = secret.rpartition("@")
    if not at:
        return ""
    try:
        return urlsplit(secret).password or ""
    except ValueError:  # no address after all; `_LOGIN` hides what is before the @
        return ""


def _forms(secret: str) -> set[str]:
    """As it is, percent-encoded or decoded, and as `repr` and JSON escape it."""
    plain = unquote(secret)
    forms = {secret, plain, quote(plain, safe=""), quote(plain), quote_plus(plain)}
    escaped = {json.dumps(form, ensure_ascii=is_ascii)[1:-1] for form in forms for is_ascii in (True, False)}
    return forms | escaped | {repr(form)[1:-1] for form in forms}
