"""Scripts that run on hosts, plain sockets alone, and what they said."""

import subprocess
import sys
import time

PORT = 7000

SERVE = """
import socket, sys
server = socket.create_server(("0.0.0.0", {port}))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
    connection.close()
"""

# For so long, whatever arrives: the counters say what did.
SEND = """
import socket, sys, time
address, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
connection = socket.create_connection((address, port), timeout=5)
connection.settimeout(None)
print("sending", flush=True)
until_s, block = time.monotonic() + seconds, bytes(1 << 16)
while time.monotonic() < until_s:
    connection.sendall(block)
"""

CONNECT = """
import socket, sys
for address, port in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    try:
        socket.create_connection((address, port), timeout=3).close()
        print("reached")
    except OSError as error:
        print(type(error).__name__, error.errno)
"""


def python(lab, host, script, *arguments, **popen):
    """A script on a host, its output to be read."""
    command = [sys.executable, "-S", "-c", script, *map(str, arguments)]
    return lab.start(host, command, stdout=subprocess.PIPE, text=True, **popen)


def said(lab, host, script, *arguments):
    """What a script on a host said by its end."""
    with python(lab, host, script, *arguments) as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    return output.splitlines()


class Stream:
    """Bytes from one host to another, for as long as ``with`` lasts."""

    def __init__(self, lab, source, target, port=PORT):
        self.lab, self.source, self.target, self.port = lab, source, target, port

    def __enter__(self):
        self.server = python(self.lab, self.target, SERVE.format(port=self.port))
        assert self.server.stdout.readline() == "ready\n"
        address = self.lab.address(self.target)
        self.client = python(self.lab, self.source, SEND, address, self.port, 60)
        assert self.client.stdout.readline() == "sending\n"
        return self

    def __exit__(self, *error):
        for process in (self.client, self.server):
            process.kill()
            process.wait()
            process.stdout.close()

    def mbit(self, seconds=0.8, settle_s=0.3):
        """Mbit/s by the counters of the source and of the target, over some time.

        The burst, and what queued before a change, pass first.
        """
        time.sleep(settle_s)
        began_s, sent, received = time.monotonic(), self.counted("source"), self.counted("target")
        time.sleep(seconds)
        took_s = time.monotonic() - began_s
        sent, received = self.counted("source") - sent, self.counted("target") - received
        return 8e-6 * sent / took_s, 8e-6 * received / took_s

    def counted(self, end):
        host = getattr(self, end)
        traffic = self.lab.interface_bytes(host)
        return traffic.sent_bytes if end == "source" else traffic.received_bytes
