"""Links lead somewhere, code runs, and the pages build."""

import ast
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import yaml

from .._snippets import ROOT, blocks, printed, promised
from .._tiers import COLLECTED

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "evidence").glob("*.md")), *DOCS]
# Lines of the guarantees without a case in `make test`. Lower it; never raise it.
MOST_SLOW = 5
# They compile, or load TensorFlow or Lightning, for seconds.
SLOW = ("compile.md", "follow.md", "lightning.md", "tensorflow.md")
CODE = [
    pytest.param(page, code, marks=[pytest.mark.slow] * (page.name in SLOW), id=f"docs/{page.name}")
    for page in DOCS
    for code in blocks(page, "python")
    if "import ray" not in code  # `tests/cluster/test_ray.py` runs it, on a cluster
]

# A recipe, by a word of its block, and the arguments that a user types to balance it.
RECIPES = [
    ("in-your-script.md", "OneCycleLR", 2),  # plain DDP
    ("loops.md", "fully_shard", 2),  # accumulation, in micro-batches
    ("checkpoints.md", "Drain", 8),  # elastic
    ("unequal-links.md", "Network", 3),  # unequal links
]


def name(page):
    return page.relative_to(ROOT).as_posix()


def prose(page):
    """A page without its fenced blocks and its code spans."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page):
    """The anchors that the headings of a page make."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page):
    """The links of a page that lead to no file, or to no heading of one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue  # another machine's page: no test of ours needs a network
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    """Every relative link names a file of this tree, and a heading that the file has."""
    assert list(broken(page)) == []


@pytest.mark.parametrize(("page", "code"), CODE)
def test_code_prints_its_comments(page, code, tmp_path, monkeypatch):
    """Pasted as it is, a block prints the lines that stand under it as comments."""
    monkeypatch.chdir(tmp_path)  # what it writes is not for this tree
    assert printed(code) == promised(code)


def pages_in(entry):
    """Return the pages of one entry of the menu, which may be a group."""
    for value in entry.values():
        if isinstance(value, str):
            yield value
        else:
            yield from (page for inner in value for page in pages_in(inner))


def test_every_page_is_in_the_menu():
    """A page that cannot be reached from the others is not read."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    listed = [path for entry in settings["nav"] for path in pages_in(entry)]

    assert sorted(listed) == [page.relative_to(ROOT / "docs").as_posix() for page in DOCS]


def test_every_promise_names_its_tests():
    """The table behind the README's promises has each of them, with files that exist."""
    promises = re.findall(r"^- \*\*(.*)\.\*\*", (ROOT / "README.md").read_text("utf-8"), re.M)
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    section = page.partition("## Promise by promise")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z][^|]*) \| ([^|]*) \|", section, re.M)
    files = re.findall(r"`((?:tests|benchmarks)/[^`]*)`", section)

    assert [promise for promise, _ in rows] == promises
    assert all("`tests/" in tests for _, tests in rows)
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages, without a warning, reference of the public names included."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", folder], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a built page leads to, what it loads, and the anchors that it has."""

    def __init__(self, file):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values.get("id"), values.get("name")}
        if tag == "a":
            self.links.append(values.get("href") or "")
        elif tag in ("link", "script", "img"):
            self.loaded.append(values.get("href") or values.get("src") or "")


@pytest.mark.slow
def test_the_pages_can_be_read_from_a_folder(site):
    """Every link leads to a file, not to a folder that a server would turn into one; and to an
    anchor that it has."""
    pages = {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    broken = []
    for file, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            target = (file.parent / path.partition("?")[0]).resolve() if path else file
            if re.match(r"[a-z]+:", link) or not (path or anchor):
                continue
            if not target.is_file() or (anchor and anchor not in pages[target].anchors):
                broken.append((file.name, link))

    assert len(pages) == len(DOCS) + 1  # and the page of what a search found
    assert broken == []


@pytest.mark.slow
def test_the_pages_need_no_network(site):
    """What they load lies beside them, formulas are drawn already, and a search asks no server."""
    for file in site.rglob("*.html"):
        for path in filter(None, Page(file).loaded):
            # From the top, as the page of a missing page has it, on a server; or from the page.
            top = site if path.startswith("/") else file.parent
            assert (top / path.removeprefix("/").partition("?")[0]).is_file(), (file.name, path)
        assert "arithmatex" not in file.read_text("utf-8")
    scripts = (site / "search" / "main.js").read_text("utf-8")

    assert "<math" in (site / "design.html").read_text("utf-8")
    assert (site / "search" / "search_index.js").read_text("utf-8").startswith("var search_index")
    assert not re.search(r"Worker|XMLHttpRequest|fetch\(", scripts)


@pytest.mark.slow
def test_the_reference_shows_usage_as_code(site):
    """On lines of its own, and not as prose."""
    page = (site / "reference.html").read_text("utf-8")
    usages = re.findall(r'<details class="usage".*?</details>', page, re.DOTALL)

    assert len(usages) > 10
    assert [usage for usage in usages if "codehilite" not in usage] == []


def test_the_reference_covers_every_public_package():
    """A package that a program may import is explained on the page of names."""
    source = ROOT / "src"
    packages = {
        ".".join(file.parent.relative_to(source).parts) for file in source.rglob("__init__.py")
    }
    programs = {"evenstep.cli", "evenstep.demo", "evenstep.doctor", "evenstep.watch"}
    public = {package for package in packages - programs if "._" not in package}
    named = set(
        re.findall(r"^::: (.*)$", (ROOT / "docs" / "reference.md").read_text("utf-8"), re.M)
    )

    assert public <= named


def promises():
    """Each line of the guarantees, with the tests that it names."""
    page = (ROOT / "docs/guarantees.md").read_text("utf-8").split("## What is not promised")[0]
    for line in page.splitlines():
        if re.match(r"\| (?!promised|---)", line):
            yield line, re.findall(r"`(tests/[\w/]+\.py::\w+)`", line)


def test_every_promise_names_tests_that_exist():
    """A line of the guarantees is worth as much as the test beside it."""
    for line, tests in promises():
        assert tests, line
        for test in tests:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text("utf-8"), test


def test_make_test_holds_every_promise(request):
    """A case of each line runs there, but of those marked slow; and none of these does."""
    fast, every = request.config.stash[COLLECTED]
    lines = list(promises())
    if not {test for _, tests in lines for test in tests} <= every:
        pytest.skip("only a run of all tests knows which ones are collected")

    assert [line for line, tests in lines if bool(fast & set(tests)) == ("*slow*" in line)] == []
    assert sum("*slow*" in line for line, _ in lines) <= MOST_SLOW


def num_arguments(code):
    """How many arguments calls into evenstep have, and those of what they return."""
    tree, total = ast.parse(code), 0
    known = {"balancer", "loader", "checkpoint"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "evenstep":
            known |= {alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            is_ours = isinstance(owner, ast.Name) and owner.id in known
            total += is_ours * (len(node.args) + len(node.keywords))
    return total


@pytest.mark.parametrize(("page", "word", "most"), RECIPES, ids=[page for page, *_ in RECIPES])
def test_a_recipe_asks_for_no_more_arguments_than_before(page, word, most):
    """A new need finds a default, or a place in a value that has one."""
    (code, *_) = [each for each in blocks(ROOT / "docs" / page, "python") if word in each]

    assert num_arguments(code) <= most


def test_a_trainer_is_balanced_without_an_argument():
    """The mix-in is all that differs from a plain one."""
    code = (ROOT / "examples" / "hf_trainer.py").read_text("utf-8")

    assert num_arguments(code) == 0
