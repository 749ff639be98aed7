"""Who waits for a rank that was stopped, or hangs, comes out wherever that is, and says where."""

import os
import signal
import socket
import threading
import traceback
from contextlib import nullcontext
from pathlib import Path
from time import sleep

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.exceptions import WorkerLostError
from evenstep.testing import WorkerFailed, run_workers
from evenstep.torch import Balancer
from evenstep.torch._exchange._startup import (
    break_off,
    is_in_collective,
    num_collectives,
    own_addresses,
    place_of,
    ports_of_store,
)

from .._tiers import slow_but
from . import silent_orders
from .stops import (
    HANG,
    IMPATIENT,
    LINGER_S,
    destroy_the_group,
    lingering,
    lose_one_while_waiting_for_input,
    struck,
)

POINTS = [
    ("in prepare", 1),  # in a data set, which `prepare` looks at
    ("before the loop", 1),
    ("forward 0", 2),
    ("forward 1", 0),
    ("step 1", 2),
    ("mean", 0),
    ("barrier", 1),
    ("save", 2),
    ("evaluation", 1),
]
KILLED = [("in prepare", 2), ("barrier", 0), ("save", 1)]
HUNG = [*POINTS, ("in prepare", 0), ("data set", 2), ("data set of evaluation", 1)]
FIRST = [("barrier", 0), ("barrier", 1)]


@pytest.mark.cluster
@pytest.mark.parametrize(("point", "victim"), slow_but(FIRST, KILLED))
def test_who_waits_for_a_killed_rank_names_it(point, victim, tmp_path):
    """Where gloo's own error comes first, and names a port."""
    killed = (str(tmp_path), point, victim, signal.SIGKILL)
    found = run_workers(3, struck, *killed, timeout_s=25, check=False)

    for rank in {0, 1, 2} - {victim}:
        told, cleaned, _ = found[rank]
        assert f"Rank {victim} on " in told
        assert cleaned


@pytest.mark.cluster
@pytest.mark.parametrize(("point", "victim"), slow_but(FIRST, POINTS))
def test_who_waits_for_a_stopped_rank_comes_out_and_names_it(point, victim, tmp_path):
    """In collectives of the balancer's, of DDP's and of the user's, and its `finally` runs."""
    found = run_workers(
        3,
        struck,
        str(tmp_path),
        point,
        victim,
        signal.SIGSTOP,
        timeout_s=25,
        check=False,
        stop_after=2,
    )

    for rank in {0, 1, 2} - {victim}:
        told, cleaned, seconds = found[rank]
        assert f"Rank {victim} on " in told
        assert "it has been silent" in told
        assert cleaned
        assert seconds < IMPATIENT.deadline_s + 5


@pytest.mark.cluster
@pytest.mark.parametrize(("point", "victim"), slow_but(FIRST, HUNG))
def test_a_rank_that_hangs_ends_all_ranks_itself_included(point, victim, tmp_path):
    """Its heartbeats go on: it is told by the collectives that it has not come to."""
    found = run_workers(3, struck, str(tmp_path), point, victim, HANG, timeout_s=25, check=False)

    for told, cleaned, seconds in found:
        assert f"Rank {victim} on " in told
        assert "stops.py" in told
        assert told.count("in hang") == 1
        assert cleaned
        assert seconds < IMPATIENT.hang_s + 5


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("point", "victim"), slow_but([("barrier", 1)], [("barrier", 1), ("barrier", 0), ("step 1", 2)])
)
def test_who_waits_for_a_rank_that_raised_comes_out_while_that_still_runs(point, victim):
    """Its goodbye has the error: the others do not wait in a collective until its process ends."""
    found = run_workers(3, lingering, point, victim, timeout_s=40, check=False, stop_after=2)

    assert isinstance(found.pop(victim), WorkerFailed)  # it has given no result yet
    for told, seconds in found:
        assert f"Rank {victim} on " in told
        assert "it raised ValueError: sample 17 has no label" in told
        assert seconds < LINGER_S


def spared(rank):
    """Break gloo's connections off beside one of Python's; return what still works."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    dist.barrier()
    count = break_off(own_addresses(), spared_ports=ports_of_store())
    client.sendall(b"here")
    heard = accepted.recv(4)
    client.close()
    accepted.close()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return count, heard, "broken off"
    return count, heard, "went on"


@pytest.mark.cluster
def test_connections_of_pythons_own_are_left_alone():
    """They lead to the same address, and are somebody else's."""
    found = run_workers(2, spared)

    assert sum(count for count, _, _ in found) >= 1  # one end may see the other's break first
    assert [rest for _, *rest in found] == [[b"here", "broken off"]] * 2


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=str)
def pair(request):
    """Two ends of a connection, and their address."""
    family, address = request.param
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"This machine has no {address}: {error}")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted, address


@pytest.mark.cluster
def test_a_look_at_connections_leaves_them_as_they_are(pair):
    """A default timeout of the user's would make gloo's non-blocking, or the store's."""
    client, accepted, address = pair
    before = os.listdir("/proc/self/fd")
    socket.setdefaulttimeout(5.0)
    try:
        found = own_addresses()
    finally:
        socket.setdefaulttimeout(None)

    assert address in found
    assert os.get_blocking(client.fileno())
    assert os.listdir("/proc/self/fd") == before
    client.sendall(b"here")
    assert accepted.recv(4) == b"here"


def alone_for_long(rank, paused):
    """Have rank 0 work alone for longer than a hang lasts; return what each ended with."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    data = TensorDataset(torch.randn(24, 4))
    told = "trained"
    try:
        with Balancer(runtime=IMPATIENT) as balancer:
            model, loader = balancer.prepare(model, DataLoader(data, batch_size=4))
            for step, (x,) in enumerate(loader):
                model(x).mean().backward()
                if step == 1 and rank == 0:
                    with balancer.pause() if paused else nullcontext():
                        if paused:
                            with balancer.pause():  # as in a function that is called from here
                                pass
                        sleep(2 * IMPATIENT.hang_s)
                dist.barrier()
    except WorkerLostError as error:
        told = str(error)
    return told


@pytest.mark.cluster
@pytest.mark.parametrize("paused", slow_but([True], [True, False]))
def test_a_rank_may_work_alone_for_long_if_it_says_so(paused):
    """The others wait at a barrier meanwhile."""
    found = run_workers(3, alone_for_long, paused, timeout_s=40)

    if paused:
        assert found == ["trained"] * 3
    else:
        assert all("Rank 0 on " in told and "in alone_for_long" in told for told in found)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("kind", "victim"),
    slow_but([("second epoch", 0)], [("second epoch", 0), ("first epoch", 0), ("stream", 2)]),
)
def test_a_rank_whose_sampler_or_stream_never_answers_is_named(kind, victim):
    """The others wait for a message of it, which is no collective."""
    found = run_workers(3, silent_orders.waited, kind, timeout_s=25, check=False)

    for told, cleaned, seconds in found:
        assert f"Rank {victim} on " in told
        assert "it has not sent a message about" in told
        assert told.count("in hang") == 1
        assert cleaned
        assert seconds < IMPATIENT.hang_s + 5


@pytest.mark.cluster
def test_a_rank_that_waits_for_its_loader_worker_hears_of_a_loss():
    """In the middle of that wait, which has no end of its own."""
    found = run_workers(2, lose_one_while_waiting_for_input, timeout_s=40, check=False)

    assert "Rank 1 on " in str(found[0])
    assert "its connection closed" in str(found[0])


@pytest.mark.cluster
def test_a_rank_that_destroyed_its_group_is_named_and_not_one_that_waits_in_it():
    """Its count in that group stays, and the others have begun a collective more."""
    for told in run_workers(2, destroy_the_group, timeout_s=40, check=False):
        assert "Rank 1 on " in str(told)
        assert "has not come to collective" in str(told)


def test_a_place_is_the_users_own_line():
    """Past the frames of Python's library, torch and evenstep."""
    entered, gate, number = threading.Event(), threading.Event(), []

    def users_function():
        number.append(threading.get_ident())
        entered.set()
        gate.wait()  # its innermost frame lies in threading.py

    thread = threading.Thread(target=users_function)
    thread.start()
    entered.wait(5)
    place = place_of(number[0])
    gate.set()
    thread.join(5)

    assert place.text.startswith("at ")
    assert "test_stops.py:" in place.text
    assert place.text.endswith(" in users_function")
    assert not place.in_collective
    assert not place.compiling


def test_a_backend_at_work_is_compiling():
    """Dynamo calls it while it converts a frame."""
    seen = []

    def backend(graph, inputs):
        seen.append(place_of(threading.get_ident()))
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))

    assert [place.compiling for place in seen] == [True]


def test_who_handles_the_error_of_a_backward_is_in_none():
    """It may be saving a checkpoint, which is not to be ended."""

    def fail(grad):
        raise RuntimeError("port 4711")

    x = torch.ones(3, requires_grad=True)
    x.register_hook(fail)
    try:
        x.sum().backward()
    except RuntimeError as error:
        last = traceback.extract_tb(error.__traceback__)[-2]
        seen = is_in_collective(threading.get_ident())

    assert last.filename.endswith("torch/autograd/graph.py")  # where it would be in one
    assert not seen


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_that_runs_is_not_compiling(backend):
    """Though files of the compiler's are on its stack."""
    seen = []

    @torch.compiler.disable
    def look():
        seen.append(place_of(threading.get_ident()))

    def forward(x):
        look()
        return look_inside(x) + 1

    @torch.library.custom_op(f"evenstep_tests::look_{backend}", mutates_args=())
    def look_inside(x: torch.Tensor) -> torch.Tensor:
        seen.append(place_of(threading.get_ident()))
        return x.clone()

    look_inside.register_fake(torch.empty_like)
    compiled = torch.compile(forward, backend=backend)
    compiled(torch.ones(3))
    seen.clear()
    compiled(torch.ones(3))

    assert [place.compiling for place in seen] == [False, False]


@pytest.mark.cluster
def test_a_group_is_known_by_what_its_maker_calls_it_or_by_its_ranks():
    """A warning names it: "undefined" would help no person."""
    for names in run_workers(2, _groups):
        assert [name.split(" (")[1] for name in names] == ["default_pg)", "ranks 0, 1)", "halves)"]


def _groups(rank):
    groups = dist.new_group([0, 1]), dist.new_group([0, 1], group_desc="halves")
    found = [name for name in num_collectives() if name.startswith("gloo group")]
    assert len(groups) == 2
    return found


@pytest.mark.cluster
@pytest.mark.parametrize("call", ["barrier", "all_reduce", "backward"])
def test_a_rank_that_waits_in_a_collective_says_in_which(tmp_path, call):
    """Called by the script itself; others in another one of as many will never come."""
    assert run_workers(2, waits_in, call, str(tmp_path / "seen")) == ["", call]


def waits_in(rank, call, seen):
    """Return in which collective rank 1 is seen to wait, before rank 0 comes to it."""
    found = [""]

    def look(thread_id):
        while not found[0]:
            found[0] = place_of(thread_id).call
        Path(seen).touch()

    model = DistributedDataParallel(nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    if rank == 1:
        threading.Thread(target=look, args=(threading.get_ident(),), daemon=True).start()
    while rank == 0 and not Path(seen).exists():
        sleep(0.01)
    if call == "barrier":
        dist.barrier()
    elif call == "all_reduce":
        dist.all_reduce(torch.ones(1))
    else:
        loss.backward()
    return found[0]
