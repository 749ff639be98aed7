"""What a lab has on the machine, found without asking the lab."""

from pathlib import Path

RUN = Path("/run/evenstep-lab")


def left_of(run_id):
    """Files, mounts, control groups and processes that a lab has, by its run id."""
    groups = [path for path in Path("/sys/fs/cgroup").glob(f"**/evenstep-lab-{run_id}*")]
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = [line for line in lines if run_id in line]
    found = [f"{pid}: {stat_of(pid)}" for pid in processes_of(run_id)]
    return [*RUN.glob(f"*{run_id}*"), *groups, *mounts, *found]


def processes_of(run_id):
    """Processes whose network is one of the lab's hosts, or whose arguments name the lab."""
    inside, named = found_of(run_id)
    return [*inside, *named]


def processes_on_hosts(run_id):
    """Those of them that are on a host by now; a moment before, an agent only names it."""
    return found_of(run_id)[0]


def found_of(run_id):
    """Processes on the lab's hosts, and others whose arguments name the lab."""
    networks = {(found.st_dev, found.st_ino) for found in map(Path.stat, RUN.glob(f"{run_id}/*"))}
    inside, named = [], []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            network = (process / "ns" / "net").stat()
            words = (process / "cmdline").read_bytes()
        except OSError:  # it ended in between
            continue
        if (network.st_dev, network.st_ino) in networks:
            inside.append(process)
        elif f"/{run_id}/".encode() in words:
            named.append(process)
    return inside, named


def running(processes):
    """Those of some processes that run still; one that nobody has asked for its code does not."""
    texts = {process: stat_of(process).rpartition(")")[2] for process in processes}
    return [process for process, text in texts.items() if text and text.split()[0] != "Z"]


def stat_of(process):
    try:
        return (process / "stat").read_text()
    except OSError:
        return ""
