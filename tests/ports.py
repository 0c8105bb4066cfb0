"""Ports for servers and coordinators that tests start."""

from __future__ import annotations

import random
import socket

# Below what systems give to those who ask for any port (32768 on Linux, 49152 elsewhere): between the choice of a
# port and its use seconds pass, in which every connection made anywhere on the machine takes a port of that range.
_PORTS = range(20000, 32000)


def free_port(address: str = "127.0.0.1") -> int:
    """A port at which nobody listens, and which nobody is given by chance."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of 100 ports of {_PORTS} is free at {address}")
