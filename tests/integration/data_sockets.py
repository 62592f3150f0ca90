"""Cuts the tcp connections between two processes that carry blocks, and leaves their control streams alone."""

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

PIDFD_GETFD = 438
"""The system call's number, the same on every architecture of Linux."""


def cut(reader: int, sender: int, control_port: int) -> int:
    """Shut down what process `reader` has dialled at `sender` at any port but `control_port`; returns how many
    connections that were."""
    ports = {
        sock.getsockname()[1]
        for sock in _sockets(sender)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    } - {control_port}
    done = 0
    for sock in _sockets(reader):
        with contextlib.suppress(OSError):  # not connected
            if sock.getpeername()[1] in ports:
                sock.shutdown(socket.SHUT_RDWR)
                done += 1
    return done


def _sockets(pid: int) -> Iterator[socket.socket]:
    """Copies of the process's internet sockets; shutting one down shuts the connection down."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if not os.readlink(entry).startswith("socket:"):
                continue
            copied = libc.syscall(PIDFD_GETFD, process, int(entry.name), 0)
            if copied < 0:
                pytest.skip(f"not allowed here: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=copied) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    yield sock
    finally:
        os.close(process)
