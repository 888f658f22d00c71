"""A chart: a matplotlib axis drawn as an SVG with accessible, highlightable points.

Matplotlib draws with placeholder colours. `page_svg` replaces them by CSS variables, so that one
SVG serves the light and the dark page; `file_svg` and `file_pdf` replace them by the colours of a
light page.
Points have a text for the pointer, the keyboard and screen readers. Everything drawn carries the
name of its method, so that the legend can highlight it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from negmerge.reports.styles import COLOURS, Style, Styles, style_of

TEXT, GRID, BACKGROUND = "#010101", "#010102", "#010103"
_PLACEHOLDERS = {name: f"#0200{k:02x}" for k, name in enumerate(COLOURS)}
_PAGE_COLOURS = {code: f"var(--{name})" for name, code in _PLACEHOLDERS.items()}
_PAGE_COLOURS |= {TEXT: "currentColor", GRID: "var(--grid)", BACKGROUND: "var(--back)"}
_FILE_COLOURS = {code: COLOURS[name][0] for name, code in _PLACEHOLDERS.items()}
_FILE_COLOURS |= {TEXT: "#1f2328", GRID: "#d0d7de", BACKGROUND: "#ffffff"}
LABEL = 48
"""The number of characters after which the label of an axis is broken."""
_RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "negmerge",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": "cycler('color', ['#010101'])",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": TEXT,
    "text.parse_math": False,
    "xtick.color": GRID,
    "xtick.labelcolor": TEXT,
    "ytick.color": GRID,
    "ytick.labelcolor": TEXT,
}
_PDF_RC = {name: _FILE_COLOURS.get(str(value), value) for name, value in _RC.items()}
_COLOURED = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def colour_of(style: Style) -> str:
    """The placeholder of a style's colour.

    >>> colour_of(style_of("consensus")) == colour_of(style_of("ties"))
    False
    """
    return _PLACEHOLDERS[style.colour]


class Drawing(str):
    """The SVG element of a chart on a page, which knows the chart.

    >>> drawing = Chart("empty", "Nothing", "x", "y").page_svg()
    >>> drawing[:18], drawing.chart.id
    ('<svg class="chart"', 'empty')
    """

    chart: Chart

    def __new__(cls, element: str, chart: Chart) -> Drawing:
        found = super().__new__(cls, element)
        found.chart = chart
        return found


class Chart:
    """A matplotlib axis; charts of the page keep the default width, which suits a phone.

    >>> chart = Chart("curve", "Accuracy by λ", "λ", "accuracy in %")
    >>> chart.point(0.5, 90.0, "consensus", "consensus: λ 0.5, 90 %")
    >>> "consensus: λ 0.5, 90 %" in chart.page_svg()
    True
    """

    def __init__(
        self,
        id: str,
        title: str,
        x: str,
        y: str,
        height: float = 3.3,
        styles: Styles | None = None,
        width: float = 5.0,
    ) -> None:
        self.id = re.sub(r"[^\w-]", "-", id)  # names in files of a run may hold anything
        self.title, self.styles = title, styles or {}
        self.tags: list[tuple[str, str]] = []
        self.lines: set[str] = set()
        with rc_context(_RC):  # pyright: ignore[reportArgumentType]
            self.figure = Figure(figsize=(width, height), layout="constrained")
            self.axes: Axes = self.figure.add_subplot(
                xlabel="\n".join(fill(line, LABEL) for line in x.splitlines()),
                ylabel=fill(y, LABEL),
            )
            self.axes.patch.set_visible(False)
            self.figure.patch.set_visible(False)

    def panel(self, rows: int, columns: int, number: int, title: str) -> None:
        """Draw what follows in a panel of its own, in a grid of panels numbered from 0.

        >>> chart = Chart("two", "Accuracy of two sets", "λ", "accuracy in %")
        >>> for number, name in enumerate(("cars", "dtd")):
        ...     chart.panel(1, 2, number, name)
        ...     chart.point(0.5, 90.0, "consensus", name)
        >>> len(chart.figure.axes)
        2
        """
        labels = {"xlabel": self.axes.get_xlabel(), "ylabel": self.axes.get_ylabel()}
        if not self.axes.has_data() and number == 0:
            self.axes.remove()
        with rc_context(_RC):  # pyright: ignore[reportArgumentType]
            self.axes = self.figure.add_subplot(rows, columns, number + 1, title=title, **labels)
            self.axes.patch.set_visible(False)

    def style(self, method: str) -> Style:
        """The style of a method, a set or the members."""
        return self.styles.get(method, style_of(method))

    def tag(self, artist: Any, method: str, text: str = "") -> None:
        """Mark an artist with its method, and with a text if it is a point of its own."""
        artist.set_gid(f"tag-{len(self.tags)}")
        self.tags.append((method, text))

    def point(
        self, x: float, y: float, method: str, text: str, size: float = 8, **options: Any
    ) -> None:
        """Draw a marker in the style of a method."""
        style = self.style(method)
        defaults = {"marker": style.marker, "color": colour_of(style), "markeredgewidth": 0.8}
        (artist,) = self.axes.plot(
            [x], [y], linestyle="none", markersize=size, **(defaults | options)
        )
        self.tag(artist, method, text)

    def ring(self, x: float, y: float, method: str) -> None:
        """Draw a ring around a point: the method that made the unlearned model."""
        options: dict[str, Any] = {"color": TEXT, "fillstyle": "none", "markeredgewidth": 1.2}
        (artist,) = self.axes.plot([x], [y], marker="o", markersize=18, linestyle="none", **options)
        self.tag(artist, method)

    def line(self, x: Iterable[float], y: Iterable[float], method: str) -> None:
        """Draw a line in the style of a method."""
        style = self.style(method)
        dashes = (0, style.dashes) if style.dashes else "solid"
        options: dict[str, Any] = {"color": colour_of(style), "linewidth": 1.6, "linestyle": dashes}
        (artist,) = self.axes.plot(list(x), list(y), **options)
        self.tag(artist, method)
        self.lines.add(method)

    def bar(self, position: float, value: float, method: str, text: str) -> None:
        """Draw a horizontal bar."""
        (artist,) = self.axes.barh([position], [value], color=colour_of(self.style(method)))
        self.tag(artist, method, text)

    def target_line(self, value: float, text: str) -> None:
        """Draw a labelled dashed line across the chart: the target or the limit of a criterion."""
        self.axes.axhline(value, color=TEXT, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        box = {"facecolor": BACKGROUND, "alpha": 0.8, "edgecolor": "none", "pad": 0}
        options: dict[str, Any] = {"fontsize": 8.5, "color": TEXT, "bbox": box}
        options |= {"ha": "right", "va": "bottom", "zorder": 5}  # above lines and points
        self.axes.text(
            0.99, value, f" {text}", transform=self.axes.get_yaxis_transform(), **options
        )

    def interval(self, low: float, high: float, height: float, method: str) -> None:
        """Draw a horizontal interval in the style of a method."""
        options: dict[str, Any] = {"color": colour_of(self.style(method)), "linewidth": 2}
        (artist,) = self.axes.plot([low, high], [height, height], **options)
        self.tag(artist, method)

    def reach_line(self, value: float, low: float | None, high: float | None) -> None:
        """Draw a dashed line from bottom to top, the value to reach, with its interval shaded."""
        if low is not None and high is not None:
            self.axes.axvspan(low, high, color=TEXT, alpha=0.07, linewidth=0, zorder=0)
        self.axes.axvline(value, color=TEXT, linestyle=(0, (4, 3)), linewidth=1, zorder=1)

    def file_svg(self) -> str:
        """The chart as the content of an SVG file."""
        return self._draw(_FILE_COLOURS)

    def add_legend(self, label: Callable[[str], str]) -> None:
        """Add a legend below the axes, for files; a page has one of its own.

        A chart whose axis names what is drawn, or that draws one thing, gets none.

        Args:
            label: the text for the name of a method or set.
        """
        names = list(dict.fromkeys(name for name, _ in self.tags))
        ticks = {tick.get_text() for axes in self.figure.axes for tick in axes.get_yticklabels()}
        if len(names) < 2 or {*names} <= ticks:
            return
        handles: list[Line2D] = []
        for name in names:
            style = self.style(name)
            dashes = (0, style.dashes) if style.dashes else "solid"
            line: Any = dashes if name in self.lines else "none"
            handles.append(
                Line2D([], [], color=colour_of(style), marker=style.marker, linestyle=line)
            )
        columns = 3
        self.figure.set_figheight(self.figure.get_figheight() + 0.2 * -(-len(names) // columns))
        self.figure.set_layout_engine("constrained")
        with rc_context(_RC):  # pyright: ignore[reportArgumentType]
            texts: Any = {"fontsize": 8, "frameon": False, "ncols": columns}
            self.figure.legend(handles, [*map(label, names)], loc="outside lower center", **texts)

    def file_pdf(self) -> bytes:
        """The chart as the content of a PDF file, with its fonts embedded.

        >>> Chart("empty", "Nothing", "x", "y").file_pdf()[:5]
        b'%PDF-'
        """
        out = io.BytesIO()
        self._recolour(_FILE_COLOURS)
        with rc_context(_PDF_RC):  # pyright: ignore[reportArgumentType]
            no_metadata = dict.fromkeys(("CreationDate", "Creator", "Producer"))
            FigureCanvasPdf(self.figure).print_pdf(out, metadata=no_metadata)
        self._recolour({colour: code for code, colour in _FILE_COLOURS.items()})
        return out.getvalue()

    def _recolour(self, colours: Mapping[str, str]) -> None:
        """Replace colours of everything that is drawn; a PDF cannot be changed afterwards."""
        texts: list[Any] = self.figure.findobj(Text)
        boxes = [box for text in texts if (box := text.get_bbox_patch()) is not None]
        for artist in (*self.figure.findobj(), *boxes):
            for name in _COLOURED:
                get, set = (getattr(artist, f"{verb}_{name}", None) for verb in ("get", "set"))
                if get is None or set is None:
                    continue
                given = get()
                found = to_rgba_array(given if given is not None else "none")
                if len(found) == 1 and (new := colours.get(to_hex(found[0]))) is not None:
                    set(new)

    def _draw(self, colours: Mapping[str, str]) -> str:
        out = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with rc_context(_RC):  # pyright: ignore[reportArgumentType]
            FigureCanvasSVG(self.figure).print_svg(out, metadata=no_metadata)
        self.figure.set_layout_engine("none")  # the places of the first drawing stay, to save time
        return re.sub(r"#0[0-9a-f]{5}\b", lambda one: colours.get(one[0], one[0]), out.getvalue())

    def page_svg(self) -> Drawing:
        """The chart as an element of the page."""
        text = self._draw(_PAGE_COLOURS)
        text = text[text.index("<svg") :]
        text = re.sub(r'\bid="', f'id="{self.id}-', text)
        text = re.sub(r'(xlink:href="|url\()#', rf"\g<1>#{self.id}-", text)
        text = text.replace("xlink:href", "href")
        text = re.sub(r" font-family: [^;]*;", "", text)  # the font of the page
        text = re.sub(r"<defs>\s*<style.*?</defs>", "", text, flags=re.DOTALL)  # would be global
        text = re.sub(r"<g id=\"\S+-tag-(\d+)\">", self._group, text)
        box = re.search(r'viewBox="[^"]+"', text)
        assert box is not None
        label = escape(self.title, quote=True)
        head = f'<svg class="chart" {box[0]} role="group" aria-label="{label}">'
        return Drawing(head + text[text.index(">") + 1 :].strip(), self)

    def _group(self, found: re.Match[str]) -> str:
        """The opening tag of an artist's group."""
        number = int(found[1])
        method, text = (escape(word, quote=True) for word in self.tags[number])
        if not text:
            return f'<g data-of="{method}">'
        first = not any(earlier for _, earlier in self.tags[:number])
        focus = 0 if first else -1  # the tab key stops once per chart; arrow keys move on
        return (
            f'<g class="named" data-of="{method}" tabindex="{focus}" role="img" '
            f'aria-label="{text}"><title>{text}</title>'
        )
