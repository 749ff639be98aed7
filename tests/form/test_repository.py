"""What the files around the code say agrees with the code, and with each other."""

import importlib.metadata
import os
import re
import subprocess
import tomllib

import pytest
import yaml

import evenstep

from .._snippets import ROOT

VERBS = (
    "setup",
    "demo",
    "test",
    "evidence",
    "lint",
    "docs",
    "bench",
    "results",
    "dist",
)
PAPERS = {
    "10.1145/3267809.3275463",  # LB-BSP, SoCC 2018
    "10.1145/3419111.3421299",  # semi-dynamic load balancing, SoCC 2020
    "10.1109/ACSOS49614.2020.00041",  # dynamic batching, ACSOS 2020
    "10.1007/s11227-023-05886-w",  # LBB, 2024
    "10.12142/ZTECOM.202301009",  # balanced parameter servers, 2023
}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def citation():
    return yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))


@pytest.fixture(scope="module")
def pins():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(project, extra):
    """The names that an extra asks for, extras of its own followed."""
    for requirement in project["optional-dependencies"][extra]:
        name, others = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", requirement).groups()
        if name == "evenstep":
            for other in others.split(","):
                yield from requirements(project, other)
        else:
            yield canonical(name)


def test_the_changelog_begins_with_this_version():
    """Whoever reads what changed reads it for the version they have."""
    versions = re.findall(
        r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M
    )

    assert versions[0] == evenstep.__version__


def test_the_citation_names_this_version_and_the_five_papers(citation, project):
    """Credit goes to the right release and to the work it stands on."""
    references = citation["references"]

    assert citation["version"] == evenstep.__version__
    assert citation["license"] == project["license"]
    assert {reference["doi"] for reference in references} == PAPERS
    for reference in references:
        assert {"title", "authors", "year", "type"} <= reference.keys()
        assert all(
            {"family-names", "given-names"} <= author.keys() for author in reference["authors"]
        )


def test_the_core_needs_numpy_and_msgspec_alone(project):
    """What decides batch sizes can be installed next to any framework."""
    needs = {re.match(r"[\w-]+", name)[0] for name in project["dependencies"]}

    assert needs == {"numpy", "msgspec"}


def test_everything_a_contributor_installs_is_pinned(project, pins):
    """Set-up gives everybody the tested versions, those of indirect needs included."""
    pinned = {canonical(name) for name in pins}
    wanted = set(requirements(project, "dev")) | {"numpy", "msgspec"}
    for name in sorted(wanted):
        for requirement in importlib.metadata.requires(name) or ():
            if "extra ==" not in requirement and ";" not in requirement:
                wanted.add(canonical(re.match(r"[\w.-]+", requirement)[0]))

    assert pins["torch"] == "2.13.0"
    assert sorted(wanted - pinned) == []


@pytest.mark.parametrize("verb", VERBS)
def test_make_knows_the_verb_and_explains_it(verb):
    """Each verb is a target, stands in ``make help`` and in CONTRIBUTING."""
    makefile = (ROOT / "Makefile").read_text("utf-8")

    assert re.search(rf"^{verb}:", makefile, re.M)
    assert f'"make {verb} ' in makefile
    assert f"make {verb}" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def steps_of(folder, *verb):
    """What ``make`` would do in a clone at ``folder``."""
    command = ["make", "--dry-run", "--no-print-directory", "--file", ROOT / "Makefile", *verb]
    of_make = {"MAKEFLAGS", "TESTS"}  # of the one that runs this test
    env = {name: value for name, value in os.environ.items() if name not in of_make}
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=True, env=env)
    return done.stdout.splitlines()


def test_the_demo_installs_what_it_needs_itself(project, tmp_path):
    """Not what the tests need; and nothing more where that is there."""
    for name in (".ci/setup", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    fresh = steps_of(tmp_path, "demo")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "ready").touch()

    assert fresh[0] == ".ci/setup .venv demo"
    assert [step for step in steps_of(tmp_path, "demo") if "setup" in step] == []
    assert {"torch", "matplotlib"} <= set(requirements(project, "demo"))
    assert not {"tensorflow", "transformers"} & set(requirements(project, "demo"))


def test_install_lines_are_for_a_clone(project):
    """No index has evenstep yet: every line that is printed names a folder, and extras it has."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    texts = "\n".join(page.read_text("utf-8") for page in pages if page.name != "CHANGELOG.md")
    lines = re.findall(r"pip install ([^`\n]*)", texts)

    assert len(lines) > 5
    for line in lines:
        extras = re.match(r'-e "\.\[([\w,]+)\]"', line)
        assert extras, line
        assert set(extras[1].split(",")) <= set(project["optional-dependencies"]), line


def test_ci_runs_what_a_contributor_runs():
    """What guards a merge is ``make test`` with all tests, and nothing else."""
    script = ROOT / ".ci" / "run"
    verbs = re.findall(r"\bmake (.*?) ARGS", script.read_text("utf-8"), re.M)

    assert os.access(script, os.X_OK)
    assert verbs == ["test TESTS=all"]


def test_a_test_is_fast_or_slow():
    """No third selection leaves one out, and no option does."""
    tiers = ("fast", "slow", "all")
    runs = {tests: steps_of(ROOT, "test", f"TESTS={tests}")[-1] for tests in tiers}
    marks = {tests: re.findall(r'-m "([^"]*)"', run) for tests, run in runs.items()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]
    options = settings["ini_options"]["addopts"]

    assert marks == {"fast": ["not slow"], "slow": ["slow"], "all": []}
    assert steps_of(ROOT, "test")[-1] == runs["fast"]
    assert not [each for each in options if re.match(r"-m|-k|--ignore|--deselect", each)]


def test_sentences_have_a_subject_that_can_be_pointed_at():
    """A rank, a worker, a thread: not the words below, behind which it stays open who acts."""
    vague = re.compile(r"\b(nobody|somebody|whoever|anybody)\b", re.IGNORECASE)
    pages = [*ROOT.glob("src/**/*.py"), *ROOT.glob("*.md")]
    pages += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("evidence/*.md")]

    assert [page.name for page in pages if vague.search(page.read_text())] == []
