"""Memory over one step as an SVG picture: a row for each stage, all on one scale, with a line where a device is full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from train_cli.timeline_svg import LEFT, TITLE

ROW, GAP = 90, 14
"""Pixels of a stage's row, and between rows."""

FILL, LIMIT = "#9ecae9", "#d62728"
GIB = 1 << 30

Curve = Sequence[tuple[str, int]]
"""The entries of a stage's list in order, each with the most bytes that are there while it runs."""


def memory_elements(curves: Mapping[str, Curve], top: int, width: int, limit: int | None = None) -> tuple[list[str], int]:
    """Returns the SVG elements of `curves`, by the names of their rows, from `top` pixels on, and where they end.

    Along a row are the entries of the list, each as wide as the others; the tooltip of one says what it is and its bytes.
    limit: the bytes of a device.
    """
    most = max([count for curve in curves.values() for _, count in curve] + ([limit] if limit is not None else []))
    body = [f'<text x="0" y="{top + TITLE - 8}" font-weight="bold">memory over one step, up to {most / GIB:.4g} GiB</text>']
    top += TITLE
    for name, curve in curves.items():
        body += _row(name, curve, top, width, most)
        if limit is not None:
            y = top + ROW * (1 - limit / most)
            body.append(f'<line x1="{LEFT}" y1="{y:.2f}" x2="{width}" y2="{y:.2f}" stroke="{LIMIT}" stroke-dasharray="4"/>')
        top += ROW + GAP
    return body, top


def _row(name: str, curve: Curve, top: int, width: int, most: int) -> Iterator[str]:
    """Yields the elements of one stage."""
    peak = max(count for _, count in curve)
    yield f'<text x="0" y="{top + ROW // 2}">{escape(name)}</text>'
    yield f'<text x="0" y="{top + ROW // 2 + 14}">{peak / GIB:.4g} GiB</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{width - LEFT}" height="{ROW}" fill="#f2f2f2"/>'
    step = (width - LEFT) / len(curve)
    for number, (entry, count) in enumerate(curve):
        height = ROW * count / most
        place = f'x="{LEFT + number * step:.2f}" y="{top + ROW - height:.2f}" width="{step:.2f}" height="{height:.2f}"'
        told = f"{escape(entry)}: {count / GIB:.6g} GiB"
        yield f'<g><title>{told}</title><rect {place} fill="{FILL}"/></g>'
