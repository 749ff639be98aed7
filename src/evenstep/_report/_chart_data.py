"""The figures of charts as the script reads them."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._types import FloatArray
from ._markup import DASHES
from ._run_figures import ReportFigures
from ._step_bins import over

_MOST_CELLS = 1 << 17  # of a heat map: 350 kB of text
_NONE = 65535
Spec = dict[str, Any]


def lines(
    run: ReportFigures,
    key: str,
    series: Mapping[str, tuple[str, FloatArray]],
    *,
    unit: str,
    extent: tuple[FloatArray, FloatArray] | None = None,
    stepped: bool = False,
) -> Spec:
    """Return a chart of lines over the steps.

    Args:
        run: whose.
        key: of the run: charts of one have the same cursor.
        series: by label, its color and a value for each stretch.
        unit: of all values.
        extent: the least and the most of the first line, drawn as a band.
        stepped: whether a value holds until the next.
    """
    found: list[Spec] = [
        {"label": label, "color": color, "values": rounded(values), "stepped": stepped}
        for label, (color, values) in series.items()
    ]
    for at, one in enumerate(found):
        one["dash"] = DASHES[at % len(DASHES)]
    if extent is not None:
        roles = zip(("least", "most"), extent, strict=True)
        found += [{"role": role, "values": rounded(values)} for role, values in roles]
    spec = {"kind": "lines", "unit": unit, "series": found}
    return (
        _on_steps(run, key)
        | spec
        | _focus([values for _, values in series.values()], () if extent is None else extent)
    )


def areas(run: ReportFigures, key: str, series: Mapping[str, tuple[str, FloatArray]]) -> Spec:
    """Return a chart of seconds on top of each other."""
    found = [
        {"label": label, "color": color, "values": rounded(values)}
        for label, (color, values) in series.items()
    ]
    spec = {"kind": "areas", "unit": "s", "series": found}
    total = np.sum([np.nan_to_num(values) for _, values in series.values()], axis=0)
    return _on_steps(run, key) | spec | _focus([total])


def _focus(series: Sequence[FloatArray], extent: Sequence[FloatArray] = ()) -> Spec:
    """Return where the axis ends at first: a few peaks would press all else to the bottom."""
    known = np.concatenate([values[~np.isnan(values)] for values in series])
    if not len(known):
        return {}
    usual = 1.5 * float(np.quantile(known, 0.97))
    has_peaks = 0 < usual < highest(*series, *extent) / 1.2
    return {"focus": rounded(np.array([usual]))[0]} if has_peaks else {}


def heat(
    run: ReportFigures,
    key: str,
    values: FloatArray,
    *,
    unit: str,
    extent: tuple[float, float],
    colors: str,
) -> Spec:
    """Return a heat map of ranks and time, as fine as its cells are not too many.

    Args:
        run: whose.
        key: of the run.
        values: ``(stretches, world_size)``, NaN where nothing is known.
        unit: of them.
        extent: values with the first color and with the last.
        colors: ``"heat"`` or ``"cool"``.
    """
    factor = math.ceil(values.size / _MOST_CELLS)
    values = wider(values, factor)
    low, high = extent
    with np.errstate(invalid="ignore"):
        cells = np.clip((values.T - low) / ((high - low) or 1.0), 0, 1) * (_NONE - 1)
    cells = np.where(np.isnan(cells), _NONE, np.rint(np.nan_to_num(cells))).astype("<u2")
    hosts = run.start.hosts if run.start else ()
    return {
        "kind": "heat",
        "run": key,
        "unit": unit,
        "colors": colors,
        "x": run.edges[::factor].tolist(),
        "width": run.width * factor,
        "rows": [hosts[rank] if rank < len(hosts) else "" for rank in range(run.world_size)],
        "low": low,
        "high": high,
        "values": base64.b64encode(cells.tobytes()).decode(),
    }


def wider(values: FloatArray, factor: int) -> FloatArray:
    """Return means over ``factor`` stretches each, without those that are NaN."""
    if factor <= 1:
        return values
    missing = -len(values) % factor
    padded = np.pad(values, ((0, missing), (0, 0)), constant_values=np.nan)
    groups = padded.reshape(-1, factor, values.shape[1])
    return over(np.nansum(groups, axis=1), (~np.isnan(groups)).sum(axis=1).astype(np.float64))


def highest(*tables: FloatArray) -> float:
    """Return the largest of the values that are known; 1 where that is 0, or none is."""
    found = [float(values[~np.isnan(values)].max(initial=0.0)) for values in tables]
    return max(found) or 1.0


def lowest(values: FloatArray) -> float:
    """Return the smallest of the values that are known; 0 where none is."""
    known = values[~np.isnan(values)]
    return float(known.min()) if len(known) else 0.0


def rounded(values: FloatArray) -> list[float | None]:
    """Return values with four digits, None for NaN."""
    return [None if math.isnan(value) else float(f"{value:.4g}") for value in values.tolist()]


def as_script(charts: Mapping[str, Spec]) -> str:
    """Return the charts as JSON that cannot end the element around it."""
    text = json.dumps(charts, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def every(run: ReportFigures, most: int = 20) -> Sequence[int]:
    """Return stretches for a table: at most so many, with the same distance."""
    step = math.ceil(len(run.edges) / most)
    return range(0, len(run.edges), step)


def _on_steps(run: ReportFigures, key: str) -> Spec:
    return {"run": key, "x": run.edges.tolist(), "width": run.width}
