"""A one-way channel from the first machine to the others: messages arrive whole and in order."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

_LENGTH = struct.Struct("!Q")
_WAIT = 600.0
_RETRY = 0.5


class Sender:
    """The first machine's end."""

    def __init__(self, address: str, port: int, receivers: int, timeout: float = _WAIT) -> None:
        """Wait for the receivers, which say which machine they are: 1 to `receivers`.

        Raises:
            TimeoutError: some did not come.
        """
        self._sockets: dict[int, socket.socket] = {}
        with socket.create_server((address, port)) as server:
            deadline = time.monotonic() + timeout
            while len(self._sockets) < receivers:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection, _ = server.accept()
                    connection.settimeout(max(deadline - time.monotonic(), 0.001))
                    (machine,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
                except TimeoutError:
                    missing = [n for n in range(1, receivers + 1) if n not in self._sockets]
                    raise TimeoutError(f"machines {missing} did not connect to {address}:{port}") from None
                except OSError:
                    continue
                if not 1 <= machine <= receivers or machine in self._sockets:
                    connection.close()
                    continue
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets[machine] = connection

    def send(self, message: bytes) -> None:
        """To every receiver.

        Raises:
            ConnectionError: one has gone.
        """
        for machine, connection in self._sockets.items():
            try:
                connection.sendall(_LENGTH.pack(len(message)) + message)
            except OSError as error:
                raise ConnectionError(f"machine {machine} has gone: {error}") from error

    def close(self) -> None:
        """End the receivers' streams."""
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()


class Receiver:
    """Another machine's end."""

    def __init__(self, address: str, port: int, machine: int, timeout: float = _WAIT) -> None:
        """Connect, as soon as the first machine is there.

        Raises:
            TimeoutError: it does not come.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._socket = socket.create_connection((address, port), timeout=_RETRY * 10)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing answers at {address}:{port}: {error}") from None
                time.sleep(_RETRY)
        self._socket.settimeout(None)
        self._socket.sendall(_LENGTH.pack(machine))

    def receive(self) -> bytes | None:
        """The next message; None when the stream has ended."""
        with contextlib.suppress(OSError):
            (length,) = _LENGTH.unpack(_read(self._socket, _LENGTH.size))
            return _read(self._socket, length)
        return None

    def close(self) -> None:
        """Go."""
        self._socket.close()


def _read(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the stream has ended")
        data += piece
    return bytes(data)
