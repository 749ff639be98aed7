"""Ports for processes that bind them later."""

import random
import socket


def free_port():
    """A port that nothing holds, below those that the system gives out by itself.

    Another process may be given one of those before it is bound here. Then one worker cannot start,
    and TensorFlow's others wait for it for ever.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
