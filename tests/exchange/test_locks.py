"""What looks at decisions is not called under the lock that decisions are published under."""

import threading

import numpy as np
import pytest

from evenstep._exchange._mailbox import Mailbox
from evenstep._exchange._ways import Ways


class Owner:
    """Looks whether another thread could publish meanwhile."""

    def __init__(self, changed):
        self.changed, self.was_free = changed, []

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


def take_mail(changed, owner):
    box = Mailbox(1, 2, None, changed, owner=owner)
    threading.Timer(0.1, lambda: box._put((0, 1, 0), np.array([7]))).start()
    assert box.take((0, 1, 0)).tolist() == [7]


def ask_for_steps(changed, owner):
    ways = Ways(0, 2, None, changed, owner=owner, differ=lambda found: None)
    message = {"reduced": [[0, 3, [[5, 1.0]], []]]}
    threading.Timer(0.1, lambda: ways.received(1, message)).start()
    assert ways.steps_of((0, 3)) == [5]


@pytest.mark.parametrize("wait", [take_mail, ask_for_steps])
def test_waiting_holds_up_no_decision(wait):
    """Rank 0 would never answer: its decision waits for the lock, and whoever has it for that."""
    changed = threading.Condition()
    owner = Owner(changed)

    wait(changed, owner)

    assert owner.was_free == [True]
