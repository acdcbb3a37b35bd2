"""A picture as SVG text: shapes and words on white, legible in light and dark pages, without a plotting library."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
INK, FAINT = "#1d2733", "#5b6673"
"""Colours of words."""


def check_svg_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` if an SVG can be written there.

    Raises:
        ValueError: If its name does not end in ``.svg``, or its folder takes no file.
    """
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise ValueError(f"A plot is an SVG, but {str(path)!r} does not end in .svg: use {path.stem or 'plan'}.svg.")
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):  # permissions alone do not show what a file system refuses
            pass
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} cannot be written: {error.strerror or error}. Name a file in a folder that exists and "
            "that you may write to."
        ) from None
    return path


class Drawing:
    """Shapes and words at places in pixels, from the upper left corner.

    Args:
        title: Read out by a screen reader.
        width: Of the picture.
    """

    def __init__(self, title: str, width: int) -> None:
        self._title, self._width = title, width
        self._shapes: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, end: bool = False, bold: bool = False, color: str = INK, most: int = 0
    ) -> None:
        """Write words on a line.

        Args:
            x: Where they begin.
            y: Of the line that they stand on.
            words: Any characters.
            end: Whether they end at ``x`` instead.
            bold: Whether they are a heading.
            color: Of the words.
            most: Characters for which there is room; the middle of longer words is left out, and shown as a hint.
        """
        shown = words
        if most and len(words) > most:
            shown = f"{words[: most // 2]}…{words[len(words) - (most - most // 2 - 1) :]}"
        attributes = f'x="{x:g}" y="{y:g}" fill="{color}"'
        attributes += ' text-anchor="end"' if end else ""
        attributes += ' font-weight="600"' if bold else ""
        hint = "" if shown == words else f"<title>{_escaped(words)}</title>"
        self._shapes.append(f"<text {attributes}>{hint}{_escaped(shown)}</text>")

    def box(self, x: float, y: float, width: float, height: float, color: str, hint: str) -> None:
        """Draw a filled rectangle; ``hint`` says what it is."""
        place = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
        self._shapes.append(f'<rect {place} fill="{color}"><title>{_escaped(hint)}</title></rect>')

    def line(self, x: float, top: float, bottom: float, color: str) -> None:
        """Draw a dashed line downwards."""
        place = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}"'
        self._shapes.append(f'<line {place} stroke="{color}" stroke-width="1.5" stroke-dasharray="5 3"/>')

    def svg(self, height: float) -> str:
        """Return the file's text.

        Args:
            height: Of the picture.
        """
        title = _NOT_XML.sub("\ufffd", self._title)
        size = f'viewBox="0 0 {self._width} {height:g}" width="{self._width}" height="{height:g}"'
        font = 'font-family="system-ui, sans-serif" font-size="12"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img" aria-label={quoteattr(title)}>',
                f"<title>{escape(title)}</title>",
                f'<rect width="{self._width}" height="{height:g}" rx="8" fill="#ffffff"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )


def _escaped(words: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", words))
