"""A lab on this machine: who reaches whom, at what rate, with how much CPU. Needs root."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evenstep.exceptions import EvenstepWarning
from evenstep.lab import Change, Host, Lab, LabUnavailable
from evenstep.lab._host import Rate

from .remains import RUN

pytestmark = [pytest.mark.alone, pytest.mark.cluster, pytest.mark.slow]

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


# Frames of 1514 bytes carry 1448 of a stream.
PAYLOAD = 1448 / 1514
BURST_MBIT = 65536 * 8e-6


@pytest.fixture(scope="module")
def lab(a_lab_can_be_made):
    """Two slow links, of which one is slower downwards, and one that is not shaped."""
    with Lab([Host(mbit=20), Host(mbit=(20, 10)), Host(cpus=0.3)]) as lab:
        yield lab


def around(rate, measured, seconds):
    """Whether a rate was kept: reached, a busy machine's part aside, and passed by bursts only."""
    return 0.85 * rate <= measured <= 1.05 * rate + BURST_MBIT / seconds


def best(measure, rate):
    """The first of a few measurements that reaches a rate: a busy machine takes, never gives."""
    found = 0.0
    for _ in range(4):
        found = measure()
        if found >= 0.85 * rate:
            break
    return found


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_hosts_reach_each_other_and_nothing_else(lab):
    """Neither this machine's own addresses, nor any network beyond."""
    with (
        socket.create_server(("0.0.0.0", 0)) as outside,
        python(lab, 1, SERVE.format(port=PORT)) as server,
    ):
        assert server.stdout.readline() == "ready\n"
        port = outside.getsockname()[1]
        own = [("127.0.0.1", port), *((address, port) for address in addresses())]
        targets = [(lab.address(1), PORT), *own, ("192.0.2.1", 80)]
        answers = said(lab, 0, CONNECT, *(part for target in targets for part in target))
        server.kill()

    assert answers[0] == "reached"
    assert answers[1].startswith("ConnectionRefused")  # its own 127.0.0.1, where nobody listens
    assert all(answer == f"OSError {errno.ENETUNREACH}" for answer in answers[2:])


def addresses():
    """IPv4 addresses of this machine, but for its own loop."""
    found = (each for some in psutil.net_if_addrs().values() for each in some)
    every = {each.address for each in found if each.family == socket.AF_INET}
    return sorted(every - {"127.0.0.1"})


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_a_process_is_its_host_s_before_it_is_itself(lab):
    """Network, name, group and variables; what the caller sets goes first."""
    look = (
        "import os, socket, json; print(json.dumps([socket.gethostname(), socket.if_nameindex(),"
        "open('/proc/self/cgroup').read(), os.environ['GLOO_SOCKET_IFNAME'], os.getsid(0),"
        "socket.gethostbyname('lab-h1'), socket.gethostbyname('localhost')]))"
    )
    with python(lab, 2, look, env={"GLOO_SOCKET_IFNAME": "lo"}) as process:
        found = json.loads(process.communicate()[0])
    name, interfaces, groups, gloo, session, *addresses = found

    assert name == "lab-h2"
    assert sorted(name for _, name in interfaces) == ["eth0", "lo"]
    assert f"/evenstep-lab-{lab.run_id}-h2\n" in groups
    assert gloo == "lo"
    assert session == process.pid
    assert addresses == [lab.address(1), "127.0.0.1"]
    assert socket.gethostname() != "lab-h2"
    assert "lab-h2" not in Path("/etc/hosts").read_text()


@pytest.mark.usefixtures("a_lab_can_be_made")
@pytest.mark.parametrize(
    ("command", "code"), [(["/no/such/thing"], 127), (["/etc/hostname"], 126), (["false"], 1)]
)
def test_what_cannot_be_started_ends_as_in_a_shell(lab, command, code):
    """With its name where it is not the command's own failure."""
    with lab.start(0, command, stderr=subprocess.PIPE, text=True) as process:
        _, error = process.communicate()

    assert process.returncode == code
    assert (command[0] in error) == (code != 1)


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_a_link_carries_its_rate_and_no_more(lab):
    """In either direction, by the counters of both ends."""
    for source, target, rate in ((0, 2, 20), (0, 1, 10)):
        with Stream(lab, source, target) as stream:
            # The upstream end of a slower target sends what is dropped there as well.
            assert around(rate, best(lambda stream=stream: stream.mbit()[1], rate), 0.8)
            assert stream.mbit(0.3)[0] <= 20 * 1.05 + BURST_MBIT / 0.3


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_the_script_gets_the_rate_less_the_headers(lab):
    """A stream of a known length, timed where it arrives; each frame has headers of its own."""
    receive = (
        "import socket, time\n"
        f"server = socket.create_server(('0.0.0.0', {PORT + 1}))\n"
        "print('ready', flush=True)\n"
        "connection, _ = server.accept()\n"
        "total = 0\n"
        "while total < 1 << 18: total += len(connection.recv(1 << 16))\n"  # past the burst
        "began, total = time.monotonic(), 0\n"
        "while part := connection.recv(1 << 16): total += len(part)\n"
        "print(8e-6 * total / (time.monotonic() - began))\n"
    )
    send = (
        "import socket, sys\n"
        f"with socket.create_connection((sys.argv[1], {PORT + 1})) as connection:\n"
        "    connection.sendall(bytes(2_500_000))\n"
    )

    def goodput():
        with python(lab, 2, receive) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            said(lab, 0, send, lab.address(2))
            return float(receiver.communicate(timeout=30)[0])

    before = lab.interface_bytes(0).sent_bytes
    first = goodput()
    sent = lab.interface_bytes(0).sent_bytes - before

    # Bundles of frames would be counted with a header each, and let through by the bundle.
    assert sent * PAYLOAD >= 0.999 * 2_500_000
    assert around(20 * PAYLOAD, best(lambda: max(first, goodput()), 20 * PAYLOAD), 0.9)


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_a_link_changes_while_it_is_used(lab):
    """The same connection goes on at the new rate, up and down again; the value follows."""
    with Stream(lab, 0, 2) as stream:
        try:
            for rate in (10, 40, None, 20):
                lab.set_mbit(0, rate)
                if rate is not None:
                    assert around(rate, best(lambda: stream.mbit(0.5)[0], rate), 0.5)
                    assert lab.hosts[0].mbit == Rate(rate, rate)
        finally:
            lab.set_mbit(0, 20)
    assert lab.hosts[0] == Host(mbit=20)


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_a_trace_changes_it_too(lab):
    """While its ``with`` lasts; it stays as the trace left it."""
    trace = [Change(0, 0, mbit=5), Change(0.2, 2, cpus=0.5), Change(0.2, 0, mbit=30)]
    with lab.play(trace):
        assert lab.hosts[0].mbit == Rate(5, 5)
        until_s = time.monotonic() + 30
        while lab.hosts[0].mbit != Rate(30, 30):
            assert time.monotonic() < until_s
            time.sleep(0.01)
    with Stream(lab, 0, 2) as stream:
        assert around(30, best(lambda: stream.mbit(0.5)[0], 30), 0.5)
    assert lab.hosts[2].cpus == 0.5

    lab.set_mbit(0, 20)
    lab.set_cpus(2, 0.3)
    with pytest.raises(ValueError, match=r"in \[0, 2\]"):
        lab.play([Change(0, 3, mbit=5)])


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_counters_count_every_byte(lab):
    """What one sends, the other receives, headers included, and nobody else sees it."""
    before = [lab.interface_bytes(host) for host in range(3)]
    send = (
        "import socket, sys\n"
        "out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for _ in range(100): out.sendto(bytes(972), (sys.argv[1], 9))\n"
    )
    said(lab, 0, send, lab.address(2))
    ends_s = time.monotonic() + 10
    sent = received = (0, 0)
    while min(sent[0], received[1]) < 101_400 and time.monotonic() < ends_s:
        sent, other, received = (
            (now.sent_bytes - then.sent_bytes, now.received_bytes - then.received_bytes)
            for now, then in zip(map(lab.interface_bytes, range(3)), before, strict=True)
        )

    # 972 bytes, 8 of UDP, 20 of IP, 14 of Ethernet; finding the address takes a frame or two.
    assert 101_400 <= sent[0] <= 101_400 + 200
    assert sent[0] - 200 <= received[1] <= sent[0]
    assert max(other) <= 200


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_nobody_speaks_unasked():
    """Neither hosts nor the switch: what is counted is what scripts send."""
    with Lab([Host(mbit=20), Host()]) as lab:
        time.sleep(1.2)  # what a bridge says by itself comes within a second
        assert [lab.interface_bytes(host) for host in range(2)] == [(0, 0), (0, 0)]


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_a_quota_is_kept(lab):
    """By all processes of a host together, and changed while they run."""
    spin = "while True: pass"
    with python(lab, 2, spin) as first, python(lab, 2, spin) as second:
        try:
            for cpus in (0.2, 0.4):
                lab.set_cpus(2, cpus)
                used = best(lambda: share(first.pid, second.pid), cpus)
                # A busy machine may give less than the quota, and little more: each core has slack.
                assert 0.25 * cpus < used < 1.5 * cpus
        finally:
            first.kill()
            second.kill()
            lab.set_cpus(2, 0.3)


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_the_kernel_has_the_quotas(lab):
    """From the beginning, after changes, and none where none was asked for; by its own files."""
    assert [quota_of(lab, host) for host in range(3)] == [None, None, 0.3]
    lab.set_cpus(2, 0.15)
    assert quota_of(lab, 2) == 0.15
    lab.set_cpus(2, None)
    assert quota_of(lab, 2) is None
    assert lab.hosts[2] == Host()

    lab.set_cpus(2, 0.3)
    assert lab.hosts[2] == Host(cpus=0.3)


def quota_of(lab, host):
    """Cores, in periods of 10 ms, by either version's files."""
    (group,) = Path("/sys/fs/cgroup").glob(f"**/evenstep-lab-{lab.run_id}-h{host}")
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
    else:
        quota, period = (
            (group / f"cpu.cfs_{x}_us").read_text().strip() for x in ("quota", "period")
        )
    assert period == "10000"
    return None if quota in ("max", "-1") else int(quota) / 10_000


def share(*pids):
    """Cores that processes use together, over half a second."""

    def used_s():
        texts = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
        fields = [text.rpartition(")")[2].split() for text in texts]
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")

    began_s, before_s = time.monotonic(), used_s()
    time.sleep(0.5)
    return (used_s() - before_s) / (time.monotonic() - began_s)


@pytest.mark.usefixtures("a_lab_can_be_made")
@pytest.mark.parametrize("host", [-1, 3])
def test_a_host_that_is_not_there_is_refused(lab, host):
    """Wherever one is named."""
    for ask in (
        lambda: lab.address(host),
        lambda: lab.start(host, ["true"]),
        lambda: lab.set_mbit(host, 5),
        lambda: lab.set_cpus(host, 0.5),
        lambda: lab.interface_bytes(host),
    ):
        with pytest.raises(ValueError, match=r"in \[0, 2\]"):
            ask()


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_more_cores_than_there_are_are_told_of():
    """All together warn, one alone is refused; nothing is made in either case."""
    cores = len(os.sched_getaffinity(0))
    with (
        pytest.warns(EvenstepWarning, match="cores together"),
        Lab([Host(cpus=cores), Host(cpus=0.5)]),
    ):
        pass
    with pytest.raises(ValueError, match="the cores of this machine"), Lab([Host(cpus=cores + 1)]):
        pytest.fail("made all the same")


def why_no_delay():
    """What a lab says that cannot delay; empty where it can."""
    try:
        with Lab([Host()], delay_ms=1):
            return ""
    except LabUnavailable as error:
        return str(error)


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_a_delay_is_each_packet_s_on_its_way_out():
    """A connection takes a round trip: both ways' delays. Rates hold beside it."""
    if missing := why_no_delay():
        pytest.skip(missing)
    with Lab([Host(mbit=20), Host()], delay_ms=30) as lab:
        with python(lab, 1, SERVE.format(port=PORT)) as server:
            assert server.stdout.readline() == "ready\n"
            script = f"import time\nbegan = time.monotonic()\n{CONNECT}\n"
            script += "print(time.monotonic() - began)"
            took_s = float(said(lab, 0, script, lab.address(1), PORT)[1])
            server.kill()
        lab.set_mbit(0, 10)
        with Stream(lab, 0, 1) as stream:
            assert around(10, best(lambda: stream.mbit(1.0)[0], 10), 1.0)
    assert 0.06 <= took_s < 1.0


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_a_delay_without_netem_says_what_is_missing():
    """And leaves nothing of the lab that could not be made."""
    before = sorted(RUN.glob("*"))
    if not (missing := why_no_delay()):
        pytest.skip("this kernel has netem")

    assert "modprobe sch_netem" in missing
    assert sorted(RUN.glob("*")) == before


@pytest.mark.usefixtures("a_lab_can_be_made")
def test_the_python_of_a_host_is_this_one(lab):
    """With its packages, whatever variables say how Python itself starts."""
    script = "import sys, evenstep; print(sys.executable)"
    with lab.start(0, [sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.communicate()[0].decode().strip() == sys.executable
