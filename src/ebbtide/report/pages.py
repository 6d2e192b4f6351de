"""The templates of self-contained HTML pages."""

from __future__ import annotations

import jinja2

from ebbtide.units import format_bytes, format_seconds


def template(name: str) -> jinja2.Template:
    """The template called ``name``, with the filters ``bytes`` and ``seconds``; unknown names in it are errors."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ebbtide.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(bytes=format_bytes, seconds=format_seconds)
    return environment.get_template(name)
