"""The file behind a peer's pool, as the peer names it: whatever it names, the answer comes at once."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from engine.types import BlockId
from transfer.host.peer_file import PeerFile, PoolFileDetails
from transfer.transport import TransferError


def test_a_pipe_in_place_of_memory_holds_nobody_up(tmp_path: Path) -> None:
    """Guards the transfer thread against a peer that names a pipe without a writer: to open that waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    found = os.fstat(reading)
    told = PoolFileDetails(os.getpid(), reading, found.st_dev, found.st_ino, blocks=1, block_bytes=64)
    errors: list[TransferError] = []

    def look() -> None:
        with pytest.raises(TransferError) as error:
            PeerFile(told, 128)
        errors.append(error.value)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(5.0)
    hung = thread.is_alive()
    if hung:  # whoever opens the other end lets it go
        os.close(os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK))
        thread.join(5.0)
    os.close(reading)
    assert not hung and "cannot map" in str(errors[0])


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK])
def test_a_file_that_may_shrink_is_not_read(seals: int) -> None:
    """Guards the reader against SIGBUS, which a page that was cut off after it was mapped ends it with."""
    fd = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, 128)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        found = os.fstat(fd)
        told = PoolFileDetails(os.getpid(), fd, found.st_dev, found.st_ino, blocks=1, block_bytes=64)
        if seals:
            assert PeerFile(told, 128).generation(BlockId(0)) == 0
        else:
            with pytest.raises(TransferError, match="not sealed"):
                PeerFile(told, 128)
    finally:
        os.close(fd)
