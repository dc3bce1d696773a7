"""The secret that the hosts of a job share, and the handshake by which two of them prove that they know it.

Both sides draw a challenge and answer with an HMAC-SHA256 of both challenges, so the secret itself never travels, and
an answer that was overheard is of no use later. What follows on the connection is neither encrypted nor signed. Does
not import torch. Start reading at `accept` and `introduce`.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from pathlib import Path

__all__ = ["TokenError", "accept", "introduce", "make_token", "read_token", "sends_greeting"]

_GREETING = b"unisono rendezvous 1\n"
_CHALLENGE_NBYTES = 32
_DIGEST_NBYTES = 32
_HANDSHAKE_S = 5.0
_GREETED_S = 0.2
_LEAST_DIGITS = 32


class TokenError(Exception):
    """The other side of a connection does not prove that it knows the token; the message is for the user."""


def make_token(path: Path) -> None:
    """Write a new token into a file that only its owner can read.

    Raises:
        OSError: The file exists, or cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, f"{secrets.token_hex(32)}\n".encode())
    finally:
        os.close(file)


def read_token(path: Path) -> str:
    """Read a token.

    Raises:
        ValueError: The file cannot be read, is open to others, or holds no token.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{path}: {reason}; make it with `unisono token {path}`, and copy it to all hosts") from error
    if mode & 0o077:
        raise ValueError(f"{path} can be read by others than its owner: chmod 600 {path}")
    if len(text) < _LEAST_DIGITS or set(text) - set("0123456789abcdef"):
        raise ValueError(f"{path} holds no token: make one with `unisono token FILE`, and copy it to all hosts")
    return text


def accept(connection: socket.socket, token: str) -> None:
    """Let the other side prove that it knows the token, and prove it to that side. Takes 5 seconds at most.

    Raises:
        TokenError: It does not.
        OSError: The connection breaks.
    """
    end_s = time.monotonic() + _HANDSHAKE_S
    ours = secrets.token_bytes(_CHALLENGE_NBYTES)
    connection.sendall(_GREETING + ours)
    theirs = _read(connection, _CHALLENGE_NBYTES, end_s)
    answer = _read(connection, _DIGEST_NBYTES, end_s)
    if not hmac.compare_digest(answer, _digest(token, b"guest", ours, theirs)):
        raise TokenError("it does not know the token")
    connection.sendall(_digest(token, b"host", ours, theirs))
    connection.settimeout(None)


def introduce(connection: socket.socket, token: str) -> None:
    """Prove to the other side that this one knows the token, and let it prove the same. Takes 5 seconds at most.

    Raises:
        TokenError: The other side has another token, or none.
        OSError: The connection breaks.
    """
    end_s = time.monotonic() + _HANDSHAKE_S
    try:
        greeting = _read(connection, len(_GREETING), end_s)
    except TimeoutError:
        greeting = b""
    if greeting != _GREETING:
        raise TokenError("asks for no token: it was started without --rdzv-token-file, or is not unisono's")
    theirs = _read(connection, _CHALLENGE_NBYTES, end_s)
    ours = secrets.token_bytes(_CHALLENGE_NBYTES)
    connection.sendall(ours + _digest(token, b"guest", theirs, ours))
    answer = _read(connection, _DIGEST_NBYTES, end_s)
    if not hmac.compare_digest(answer, _digest(token, b"host", theirs, ours)):
        raise TokenError("has another token than this host: copy the file from one host to all")
    connection.settimeout(None)


def sends_greeting(connection: socket.socket) -> bool:
    """Return True if the other side asks for a token. A store of torch sends nothing of its own accord."""
    connection.settimeout(_GREETED_S)
    try:
        return connection.recv(len(_GREETING), socket.MSG_PEEK) == _GREETING
    except TimeoutError:
        return False


def _digest(token: str, side: bytes, host: bytes, guest: bytes) -> bytes:
    return hmac.digest(token.encode(), side + host + guest, "sha256")


def _read(connection: socket.socket, nbytes: int, end_s: float) -> bytes:
    """Read so many bytes until a moment, however slowly they come; fewer if the other side closes."""
    data = b""
    while len(data) < nbytes:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(left_s)
        if not (more := connection.recv(nbytes - len(data))):
            return data  # which is no valid answer
        data += more
    return data
