"""Stores without a network."""


class DictStore:
    """A store that fails where a wait would begin."""

    def __init__(self):
        self.keys = {}
        self.most = 0

    def set(self, key, value):
        self.keys[key] = value
        self.most = max(self.most, len(self.keys))

    def check(self, keys):
        return all(key in self.keys for key in keys)

    def get(self, key):
        return self.keys[key]

    def delete_key(self, key):
        return self.keys.pop(key, None) is not None
