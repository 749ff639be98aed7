"""The published rules, one file each, without the mistakes that each docstring lists.

``LbBsp2018``, ``LbBsp2020``, ``DynamicBatching``, ``Lbb`` and ``Dbs``: ``evenstep.policies`` has
their names. The paper of 2023 on balanced parameter servers decides no batch sizes; its shares of
the aggregation are elsewhere.
"""
