"""Start a script several times on this machine, as the workers of one cluster of TensorFlow's.

Run it with the number of workers, the script and its arguments:
`python examples/local_workers.py 3 examples/keras_digits.py`.
"""

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress


def free_ports(number):
    """Ports that nothing holds, below those that the system may give to others meanwhile."""
    with ExitStack() as sockets:
        found = []
        while len(found) < number:
            with suppress(OSError):
                server = socket.create_server(("", random.randrange(20_000, 32_000)))
                found.append(sockets.enter_context(server).getsockname()[1])
        return found


def main():
    num_workers, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
    workers = []
    for index in range(num_workers):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        workers.append(subprocess.Popen(command, env={**os.environ, "TF_CONFIG": config}))
    sys.exit(max(abs(worker.wait()) for worker in workers))


if __name__ == "__main__":
    main()
