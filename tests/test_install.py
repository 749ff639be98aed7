"""A missing extra is added by the line that is printed, wherever evenstep came from."""

import json
import shlex
import sys

import pytest

from evenstep._install import install_line

EDITABLE = {"url": "file:///home/me/my%20clone", "dir_info": {"editable": True}}


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (None, ["evenstep[demo]"]),
        (EDITABLE, ["-e", "/home/me/my clone[demo]"]),
        ({**EDITABLE, "dir_info": {}}, ["/home/me/my clone[demo]"]),
        ({"url": "file:///tmp/x.whl", "archive_info": {}}, ["/tmp/x.whl[demo]"]),
    ],
    ids=["index", "clone", "folder", "wheel"],
)
def test_the_line_names_where_evenstep_came_from(origin, words, tmp_path, monkeypatch):
    """An index by name; a clone, which no index need know, by its path."""
    info = tmp_path / "evenstep-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: evenstep\nVersion: 0.1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    assert shlex.split(install_line("demo")) == ["pip", "install", *words]
