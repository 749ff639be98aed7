"""TensorFlow's coordination service, which the chief runs, as a store for what ranks tell."""

from __future__ import annotations

import base64
from typing import final

import tensorflow as tf
from tensorflow.python.eager import context  # not public: it has the service

_WAIT_MS = 20  # for a key that may not be there: the service has no way to ask without a wait


@final
class ServiceStore:
    """A ``MailStore``: small keys, and no collective of TensorFlow's.

    Args:
        prefix: of all keys, the same on all workers.
    """

    def __init__(self, prefix: str) -> None:
        self._service = context.context()
        self._prefix = prefix
        self._known: dict[str, bytes] = {}  # that ``check`` has found

    def set(self, key: str, value: bytes) -> None:
        """Write a key; the service writes none twice, so what is there is deleted first."""
        name = self._name(key)
        self._service.delete_config_key_value(name)
        self._service.set_config_key_value(name, base64.b64encode(value).decode())

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""
        return all(self._is_there(key) for key in keys)

    def get(self, key: str) -> bytes:
        """Return a key that was found to be there."""
        return self._known[key]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        self._service.delete_config_key_value(self._name(key))
        return self._known.pop(key, None) is not None

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _is_there(self, key: str) -> bool:
        try:
            text = self._service.get_config_key_value(self._name(key), _WAIT_MS)
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            return False
        self._known[key] = base64.b64decode(text)
        return True


def next_prefix() -> str:
    """Return a prefix that no earlier watch of this process had; all workers count alike."""
    service = context.context()
    number = getattr(service, "_evenstep_watches", 0)  # the service never forgets a name
    service._evenstep_watches = number + 1
    return f"evenstep_watch/{number}"
