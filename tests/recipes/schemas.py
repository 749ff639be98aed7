"""What is wrong with a manifest, by a schema or by the models of Kubeflow's package."""

from __future__ import annotations

KINDS = {"object": dict, "array": list, "string": str, "integer": int}


def faults(schema, value, path="manifest"):
    """What a value has that its schema does not allow, by its place."""
    kind = KINDS[schema["type"]]
    if not isinstance(value, kind) or isinstance(value, bool):
        yield f"{path}: {value!r} is no {schema['type']}"
    elif value not in schema.get("enum", [value]):
        yield f"{path}: {value!r} is none of {schema['enum']}"
    elif kind is dict and not schema.get("x-checked-elsewhere"):
        known, required = schema.get("properties", {}), schema.get("required", ())
        yield from (f"{path}.{name}: unknown" for name in value if name not in known)
        yield from (f"{path}.{name}: missing" for name in required if name not in value)
        for name in value.keys() & known.keys():
            yield from faults(known[name], value[name], f"{path}.{name}")


def lost(given, kept, path="manifest"):
    """What of ``given`` a model did not keep: fields that it does not know, which it drops."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from lost(value, kept.get(name), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (mine, theirs) in enumerate(zip(given, kept, strict=True)):
            yield from lost(mine, theirs, f"{path}[{number}]")
    elif given != kept:
        yield f"{path}: {given!r} is not known"
