"""What is written can be read again, and what is damaged is refused with the remedy."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from msgspec import ValidationError
from msgspec.json import decode

from evenstep._doctor import (
    RankFacts,
    host_mbit,
    judge,
    read_checkup,
    run_times,
    to_json,
)

from .facts import checkup, healthy, healthy_checkups, links, pace, rank


def written(folder, case):
    file = folder / "doctor.json"
    file.write_text(to_json(case, judge(case)), "utf-8")
    return file


@given(case=healthy_checkups())
def test_a_checkup_survives_its_file(tmp_path_factory, case):
    """To the last bit."""
    assert read_checkup(written(tmp_path_factory.mktemp("checkup"), case)) == case


def damaged(change):
    """The text of a file after a change of its record."""
    record = json.loads(to_json(healthy(), ()))
    change(record)
    return json.dumps(record)


def drop_rate(record):
    del record["checkup"]["links"][0]["bytes_per_s"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be JSON"),
        ('{"schema": "evenstep.doctor", "vers', "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "schema"),
        ('{"schema": "evenstep.cluster-profile"}', "schema"),
        (damaged(lambda r: r.update(version=2)), "version from 1 to 1"),
        (damaged(lambda r: r.update(version=True)), "a version, got .*got `bool`"),
        (damaged(lambda r: r.pop("checkup")), "hold a checkup, got .*got `null`"),
        (damaged(lambda r: r["checkup"].update(world_size="3")), r"`int`, got `str`.*world_size"),
        (damaged(drop_rate), "missing required field `bytes_per_s`"),
        (damaged(lambda r: r["checkup"]["paces"][0].update(rank=7)), r"nothing is known of.*7"),
        (damaged(lambda r: r["checkup"]["paces"][0]["seconds"].pop()), "the times of rank 0"),
        (
            damaged(lambda r: r["checkup"]["paces"][1].update(sizes=[0] * 20)),
            r">= 1 .*paces\[1\].sizes",
        ),
        (damaged(lambda r: r["checkup"]["ranks"][0].update(rank=1)), r"ranks are \[1, 1, 2\]"),
        (
            damaged(lambda r: r["checkup"].update(global_batch_size=0)),
            ">= 1 .*global_batch_size",
        ),
        (
            damaged(lambda r: r["checkup"]["links"][0].update(bytes_per_s=-1.0)),
            ">= 0.0 .*bytes_per_s",
        ),
        (damaged(lambda r: r["checkup"]["ranks"][0].update(device=None)), "got `null`.*device"),
        (
            damaged(lambda r: r["checkup"]["links"][0].update(bytes_per_s=float("nan"))),
            "must be JSON",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text, words):
    """With the place of the damage and how such a file is made."""
    file = tmp_path / "doctor.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_checkup(file)

    assert "evenstep doctor --out" in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    """As of another program's file."""
    (tmp_path / "doctor.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="must be JSON"):
        read_checkup(tmp_path / "doctor.json")


def test_facts_of_another_version_can_be_read():
    """Ranks with unlike versions are to be named, not to end in an error."""
    record = json.loads(json.dumps(asdict(rank(3))))
    record |= {"feeling": "well", "cpu": record["cpu"] | {"sockets": 2}}
    del record["unused_gpus"], record["cpu"]["pressure"]

    assert decode(json.dumps(record), type=RankFacts) == rank(3)
    del record["versions"]
    with pytest.raises(ValidationError, match="versions"):
        decode(json.dumps(record), type=RankFacts)


def test_times_become_fixed_cost_and_speed():
    """Of each rank that has some, in its place."""
    case = replace(healthy(), paces=(pace(0, speed=1000), pace(2, speed=250)))
    found = run_times(case)

    np.testing.assert_allclose(1 / found.times.slope_s, [1000, 250], rtol=1e-6)
    np.testing.assert_allclose(found.times.intercept_s, 0, atol=1e-9)
    assert found.names == ("a some CPU", "c some CPU")
    assert (found.ranks, found.untimed) == ((0, 2), (1,))
    assert found.global_batch_size == 96


def test_without_times_there_is_no_advice():
    """And the error says to run it again."""
    with pytest.raises(ValueError, match="hold the times of a rank, got none"):
        run_times(checkup(rank(0)))


def test_a_host_s_link_is_the_best_that_it_had():
    """A pair is as slow as the slower of two, so the best peer shows the own one."""
    case = replace(healthy(), links=links(3, r2=100.0, r1=400.0))

    assert host_mbit(case) == pytest.approx({"boot-a": 400, "boot-b": 400, "boot-c": 100})
    assert host_mbit(replace(case, links=())) == {}
