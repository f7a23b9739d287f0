"""Pages of text, tables and figures: as Markdown, and as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment
from matplotlib.figure import Figure

from crossfed.platform.checkpoint import writing
from crossfed.platform.report import figures
from crossfed.platform.report.tables import Grid


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Attributes:
        text: paragraphs before the tables; what stands between backticks is code.
        grids: its tables. pictures: name -> figure, or a PNG file, after the tables.
        details: summary -> text to unfold, as it is; at the end.
    """

    title: str
    text: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    pictures: tuple[tuple[str, Figure | Path], ...] = ()
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        about: paragraphs under the title.
    """

    title: str
    about: tuple[str, ...]
    sections: tuple[Section, ...]

    def markdown(self) -> str:
        """GitHub Markdown; pictures are links to `figures/<name>.png` beside it."""
        parts = [f"# {self.title}", *self.about]
        for section in self.sections:
            parts += [f"## {section.title}", *section.text]
            for grid in section.grids:
                parts += [f"### {grid.title}", grid.markdown().rstrip("\n")]
            parts += [f"![{name}](figures/{name}.png)" for name, _ in section.pictures]
            parts += [
                f"### {name}\n\n```text\n{text.rstrip()}\n```" for name, text in section.details
            ]
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """One self-contained file: style, tables and pictures are inside, and nothing is
        fetched.
        """
        return _TEMPLATE.render(page=self)


def write(page: Page, base: Path) -> tuple[Path, Path]:
    """Write `<base>.md`, `<base>.html` and the Markdown's pictures in `figures/` beside it.

    Raises:
        CrossfedError: the disk is full or cannot be written.
    """
    files = base.with_name(f"{base.name}.md"), base.with_name(f"{base.name}.html")
    with writing(base.parent):
        for section in page.sections:
            for name, figure in section.pictures:
                target = base.parent / "figures" / f"{name}.png"
                if isinstance(figure, Figure):
                    figures.save(figure, target)
                elif figure != target:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(figure.read_bytes())
        files[0].write_text(page.markdown(), encoding="utf-8")
        files[1].write_text(page.html(), encoding="utf-8")
    return files


def _inline(figure: Figure | Path) -> str:
    """A figure as a data URI."""
    if isinstance(figure, Path):
        picture = figure.read_bytes()
    else:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        picture = buffer.getvalue()
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.filters["inline"] = _inline
_MACROS = """
{% macro prose(text) %}
{% for piece in text.split("`") %}{% if loop.index0 % 2 %}<code>{{ piece }}</code>{% else %}{{ piece }}{% endif %}{% endfor %}
{% endmacro %}
{% macro line(grid, row) %}
<tr>
{% for cell in grid.cells(row) %}
<td{% if grid.columns[loop.index0].right %} class="right"{% endif %}>{% if cell.best %}<b>{% elif cell.second %}<u>{% endif -%}
{{ cell.text }}{% if cell.best %}</b>{% elif cell.second %}</u>{% endif %}{{ cell.mark }}</td>
{% endfor %}
</tr>
{% endmacro %}
{% macro shown(grid) %}
<h3>{{ grid.title }}</h3>
<div class="wide">
<table>
<thead>
{% if grid.groups() %}
<tr>{% for name, span in grid.groups() %}<th class="group" colspan="{{ span }}">{{ name }}</th>{% endfor %}</tr>
{% endif %}
<tr>{% for column in grid.columns %}<th{% if column.right %} class="right"{% endif %}>{{ column.name }}</th>{% endfor %}</tr>
</thead>
<tbody>
{% for row in grid.rows %}{{ line(grid, row) }}{% endfor %}
</tbody>
{% if grid.foot %}
<tfoot>
{% for row in grid.foot %}{{ line(grid, row) }}{% endfor %}
</tfoot>
{% endif %}
</table>
</div>
<p class="caption">{{ prose(grid.caption) }}</p>
{% endmacro %}
"""  # noqa: E501
_TEMPLATE = _ENVIRONMENT.from_string(
    _MACROS
    + """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; padding-bottom: .25rem; }
p { max-width: 50rem; } code { background: #f2f2f2; padding: .1em .3em; border-radius: 3px; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd; }
thead th { border-bottom: 1.5px solid #1a1a1a; } tfoot td { border-top: 1.5px solid #1a1a1a; }
thead th.group { text-align: center; } body { padding: 0 1rem; }
.right { text-align: right; white-space: nowrap; } caption, .caption { color: #555; font-size: .875rem; max-width: 50rem; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } summary { cursor: pointer; }
pre { background: #f2f2f2; padding: .75rem; overflow-x: auto; font-size: .8125rem; line-height: 1.35; }
</style>
</head>
<body>
<h1>{{ page.title }}</h1>
{% for text in page.about %}
<p>{{ prose(text) }}</p>
{% endfor %}
{% for section in page.sections %}
<section>
<h2>{{ section.title }}</h2>
{% for text in section.text %}
<p>{{ prose(text) }}</p>
{% endfor %}
{% for grid in section.grids %}
{{ shown(grid) }}
{% endfor %}
{% for name, figure in section.pictures %}
<figure><img src="{{ figure | inline }}" alt="{{ name }}"></figure>
{% endfor %}
{% for name, text in section.details %}
<details><summary>{{ name }}</summary><pre>{{ text }}</pre></details>
{% endfor %}
</section>
{% endfor %}
</body>
</html>
"""  # noqa: E501
)
_FRAGMENT = _ENVIRONMENT.from_string(
    _MACROS + "{% for grid in grids %}{{ shown(grid) }}{% endfor %}"
)


def fragment(grids: Sequence[Grid]) -> str:
    """Tables as a piece of HTML, for a notebook."""
    return _FRAGMENT.render(grids=grids)
