"""Training scripts in the shapes that published ones have; each trains two epochs on two ranks."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(__file__).parent / "scripts"


def read(notes):
    """What lines say to do, the diff and the line that it is in."""
    changes = [note for note in notes if "`git apply`" in note]
    where, _, diff = "".join(changes).partition(":\n")
    to_do = tuple(note for note in notes if note not in changes)
    return SimpleNamespace(to_do=to_do, where=where, diff=diff)


@dataclass(frozen=True)
class Shape:
    """A script, where its parts are made, and what the change has to be.

    Attributes:
        file: its name in the folder, without the suffix.
        model: what the line with DDP or ``fully_shard`` has.
        loader: what that with the loader has.
        after: the end of the line that the change follows.
        prepared: the names, with model first.
        launcher: ``"torchrun"``, ``"python"``, or empty for a script that does not run by itself.
    """

    file: str
    model: str
    loader: str
    after: str
    prepared: str
    launcher: str = "torchrun"

    @property
    def text(self) -> str:
        """The script."""
        return (FOLDER / f"{self.file}.py").read_text("utf-8")

    def line_of(self, what: str) -> int:
        """Return the last line that has ``what``, from 1."""
        lines = self.text.splitlines()
        return max(number for number, line in enumerate(lines, 1) if what in line)

    @property
    def lines(self) -> dict[str, int]:
        """Where its parts are made, as a watch says it."""
        return {"model_line": self.line_of(self.model), "loader_line": self.line_of(self.loader)}


SHAPES = [
    Shape(
        "ddp_tutorial",
        "= DDP(",
        "return DataLoader(",
        "self.model = DDP(model)",
        "self.model, self.train_data",
    ),
    Shape(
        "mnist",
        "DistributedDataParallel(model)",
        "DataLoader(dataset1",
        "DistributedDataParallel(model)",
        "model, train_loader",
    ),
    Shape(
        "mingpt",
        "= DDP(",
        "return DataLoader(",
        "across all the processes.",
        "self.model, self.train_loader",
    ),
    Shape(
        "timm_train",
        "= NativeDDP(",
        "loader_train = create_loader(",
        "    )",
        "model, loader_train",
        "",
    ),
    Shape(
        "torchtune_like",
        "DistributedDataParallel(model)",
        "dataloader = DataLoader(",
        "shuffle=True)",
        "self._model, self._dataloader",
    ),
    Shape(
        "fsdp2",
        "fully_shard(model,",
        "loader = DataLoader(",
        "sampler=DistributedSampler(dataset))",
        "model, loader",
    ),
    Shape(
        "experiment_class",
        "= DDP(",
        "data.DataLoader(",
        "self.build_model()",
        "self.model, self.loader",
    ),
    Shape(
        "loader_functions",
        "return DistributedDataParallel",
        "train_loader = DataLoader(",
        "model = get_model()",
        "model, train_loader",
    ),
    Shape("spawned", "= DDP(", "loader = DataLoader(", "= DDP(model)", "model, loader", "python"),
    Shape(
        "one_page", "DistributedDataParallel(", "DataLoader(", "DataLoader(data)", "model, loader"
    ),
]
"""Those of which the change is certain."""

BY_NAME = {shape.file: shape for shape in SHAPES}
NANOGPT = FOLDER / "nanogpt.py"
"""Draws its batches without a loader."""
