"""The README for the package index, where links relative to this tree lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Has links begin with `[project.urls] Source`; without that setting they stay relative."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata of a build."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        source = metadata.get("urls", {}).get("Source")
        if source:
            text = absolute(text, source.rstrip("/"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, source: str) -> str:
    """Return Markdown whose relative links lead into the repository at ``source``."""

    def replace(found: re.Match[str]) -> str:
        image, title, path = found.groups()
        return f"{image}{title}{source}/{'raw' if image else 'blob'}/main/{path})"

    return _LINK.sub(replace, text)
