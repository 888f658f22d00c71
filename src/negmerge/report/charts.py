"""One drawing on the page: a matplotlib axis that becomes an SVG whose points have names.

Colours are put in as placeholders and leave as CSS variables, so one SVG serves a light and a dark
page; every point carries its name for the pointer, the keyboard and screen readers, and everything
drawn the method that it is of, so that the legend can pick it out.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from negmerge.report.colours import PAIRS, Look, Looks, look_of

INK, GRID, PAPER = "#010101", "#010102", "#010103"
_PLACE = {name: f"#0200{k:02x}" for k, name in enumerate(PAIRS)}
_BACK = {place: f"var(--{name})" for name, place in _PLACE.items()}
_BACK |= {INK: "currentColor", GRID: "var(--grid)", PAPER: "var(--back)"}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "negmerge",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": "cycler('color', ['#010101'])",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.color": GRID,
    "ytick.labelcolor": INK,
}


def paint(look: Look) -> str:
    """The placeholder for a method's colour.

    >>> paint(look_of("consensus")) == paint(look_of("consensus")) != paint(look_of("ties"))
    True
    """
    return _PLACE[look.colour]


class Chart:
    """An axis to draw on.

    >>> chart = Chart("curve", "Accuracy by λ", "λ", "accuracy in %")
    >>> chart.point(0.5, 90.0, "consensus", "consensus: λ 0.5, 90 %")
    >>> "consensus: λ 0.5, 90 %" in chart.svg()
    True

    id: unique on the page. title: what it shows, in words. x, y: labels of the axes.
    height: in inches; the width is the same for all, and a phone's. looks: of the page's methods.
    """

    def __init__(
        self,
        id: str,
        title: str,
        x: str,
        y: str,
        height: float = 3.3,
        looks: Looks | None = None,
    ) -> None:
        self.id, self.title, self.looks = id, title, looks or {}
        self.parts: list[tuple[str, str]] = []
        with rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
            self.figure = Figure(figsize=(5.0, height), layout="constrained")
            self.axes: Axes = self.figure.add_subplot()
            self.axes.patch.set_visible(False)
            self.figure.patch.set_visible(False)
            self.axes.set_xlabel(x)
            self.axes.set_ylabel(y)

    def look(self, method: str) -> Look:
        """How a method, a set or the members look here."""
        return self.looks.get(method, look_of(method))

    def part(self, artist: Any, method: str, name: str = "") -> None:
        """Say which method an artist is of, and its name if it has one."""
        artist.set_gid(f"part-{len(self.parts)}")
        self.parts.append((method, name))

    def point(
        self, x: float, y: float, method: str, name: str, size: float = 8, **style: Any
    ) -> None:
        """A marker in the method's look."""
        own = self.look(method)
        look: dict[str, Any] = {"marker": own.marker, "color": paint(own)}
        look |= {"markersize": size, "linestyle": "none", "markeredgewidth": 0.8}
        look |= style
        (artist,) = self.axes.plot([x], [y], **look)
        self.part(artist, method, name)

    def ring(self, x: float, y: float, method: str) -> None:
        """A ring about a point: the method that made the unlearned model."""
        look: dict[str, Any] = {"color": INK, "fillstyle": "none", "markeredgewidth": 1.2}
        (artist,) = self.axes.plot([x], [y], marker="o", markersize=18, linestyle="none", **look)
        self.part(artist, method)

    def line(self, x: Iterable[float], y: Iterable[float], method: str, **style: Any) -> None:
        """A line in the method's look."""
        own = self.look(method)
        look: dict[str, Any] = {"color": paint(own), "linewidth": 1.6}
        if own.dashes:
            look["linestyle"] = (0, own.dashes)
        look |= style
        (artist,) = self.axes.plot(list(x), list(y), **look)
        self.part(artist, method)

    def bar(self, place: float, value: float, method: str, name: str, **style: Any) -> None:
        """A horizontal bar."""
        (artist,) = self.axes.barh([place], [value], color=paint(self.look(method)), **style)
        self.part(artist, method, name)

    def level(self, value: float, text: str, along: str = "x") -> None:
        """A dashed line across, with a word on it: a target or a constraint."""
        draw = self.axes.axhline if along == "x" else self.axes.axvline
        draw(value, color=INK, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        at = (0.99, value) if along == "x" else (value, 0.99)
        where = self.axes.get_yaxis_transform() if along == "x" else self.axes.get_xaxis_transform()
        side = "right" if along == "x" else "left"
        vertical = "bottom" if along == "x" else "top"
        clear = {"facecolor": PAPER, "alpha": 0.6, "edgecolor": "none", "pad": 0}
        look: dict[str, Any] = {"fontsize": 8.5, "color": INK, "bbox": clear}
        look["zorder"] = 3  # above the lines
        self.axes.text(*at, f" {text}", transform=where, ha=side, va=vertical, **look)

    def svg(self) -> str:
        """The drawing as it goes into the page."""
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
            FigureCanvasSVG(self.figure).print_svg(out, metadata=nothing)
        text = out.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r'\bid="', f'id="{self.id}-', text)
        text = re.sub(r'(xlink:href="|url\()#', rf"\g<1>#{self.id}-", text)
        text = text.replace("xlink:href", "href")
        text = re.sub(r"#0[0-9a-f]{5}\b", lambda found: _BACK.get(found[0], found[0]), text)
        text = re.sub(r" font-family: [^;]*;", "", text)  # the page's own
        text = re.sub(r"<defs>\s*<style.*?</defs>", "", text, flags=re.DOTALL)  # would be global
        text = re.sub(r"<g id=\"\S+-part-(\d+)\">", self._tell, text)
        shape = re.search(r'viewBox="[^"]+"', text)
        assert shape is not None
        label = escape(self.title, quote=True)
        head = f'<svg class="chart" {shape[0]} role="group" aria-label="{label}">'
        return head + text[text.index(">") + 1 :].strip()

    def _tell(self, found: re.Match[str]) -> str:
        number = int(found[1])
        method, name = (escape(word, quote=True) for word in self.parts[number])
        if not name:
            return f'<g data-of="{method}">'
        first = not any(earlier for _, earlier in self.parts[:number])
        focus = 0 if first else -1  # one stop of the tab key; arrows go from point to point
        return (
            f'<g class="named" data-of="{method}" tabindex="{focus}" role="img" '
            f'aria-label="{name}"><title>{name}</title>'
        )
