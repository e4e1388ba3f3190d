"""TCP ports of this machine."""

from __future__ import annotations

import socket


def is_free(address: str, port: int) -> bool:
    """Whether a server may listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def accepts(address: str, port: int) -> bool:
    """Whether a server listens there now."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def free_port(address: str = "127.0.0.1") -> int:
    """A port where a server may listen now."""
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])
