"""Start a script several times on this machine, as the workers of one cluster of TensorFlow's.

Run it with the number of workers, the script and its arguments:
`python examples/local_workers.py 3 examples/keras_digits.py`.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack


def main():
    num_workers, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    with ExitStack() as sockets:
        free = [sockets.enter_context(socket.create_server(("", 0))) for _ in range(num_workers)]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in free]
    workers = []
    for index in range(num_workers):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        workers.append(subprocess.Popen(command, env={**os.environ, "TF_CONFIG": config}))
    sys.exit(max(abs(worker.wait()) for worker in workers))


if __name__ == "__main__":
    main()
