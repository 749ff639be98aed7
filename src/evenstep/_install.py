"""How an extra that is missing is added, wherever evenstep itself came from."""

from __future__ import annotations

import json
from importlib import metadata
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_line(extra: str) -> str:
    """Return the command that adds ``extra`` to this installation, to be typed as it stands.

    A clone or a wheel is named by its path, since no index need have it; only where evenstep came
    from an index, its name will do.
    """
    try:
        written = metadata.distribution("evenstep").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # on the path, and not installed
        written = None
    origin = json.loads(written or "{}")
    url = urlsplit(origin.get("url", ""))
    source = url2pathname(url.path) if url.scheme == "file" else "evenstep"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f'pip install {editable}"{source}[{extra}]"'
