"""What looks at decisions is not called under the lock that decisions are published under."""

import threading

import pytest

from evenstep._exchange._mailbox import Mailbox
from evenstep._exchange._message_kinds import NumbersPosted, StepsTold
from evenstep._exchange._ways import Ways

from .channels import router


class Owner:
    """Looks whether another thread could publish meanwhile."""

    is_broken = False

    def __init__(self):
        self.changed, self.was_free = None, []

    def check(self):
        """No worker is lost."""

    def check_left(self):
        def publish():
            if self.changed.acquire(timeout=2.0):
                self.was_free.append(True)
                self.changed.release()

        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()


def take_mail(asking):
    box = Mailbox(asking)
    posted = NumbersPosted((0, 1, 0), "<u1", "Bw==")
    threading.Timer(0.1, lambda: box.received(0, posted)).start()
    assert box.take((0, 1, 0)).tolist() == [7]


def ask_for_steps(asking):
    ways = Ways(asking, differ=lambda found: None)
    told = StepsTold((0, 3), (5,))
    threading.Timer(0.1, lambda: ways.received(0, told)).start()
    assert ways.steps_of((0, 3)) == (5,)


@pytest.mark.parametrize("wait", [take_mail, ask_for_steps])
def test_waiting_holds_up_no_decision(wait):
    """Rank 0 would never answer: its decision waits for the lock, and whoever has it for that."""
    owner = Owner()
    asking = router(1, 2, None, owner=owner)
    owner.changed = asking.changed

    wait(asking)

    assert owner.was_free == [True]
