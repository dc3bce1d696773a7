"""Text for HTML: everything that comes from a run is escaped here, and nowhere else."""

from __future__ import annotations

import html
import json
from typing import Any

from unisono.watch.continuation import finite

__all__ = ["embedded_json", "text"]


def text(value: object) -> str:
    """Return a value as text for HTML, also within quotes of an attribute.

    Control characters, and those that change the direction of what follows, are shown as "?".

    >>> text('<script>"&\\x00')
    '&lt;script&gt;&quot;&amp;?'
    """
    shown = "".join(sign if sign.isprintable() or sign in "\n " else "?" for sign in str(value))
    return html.escape(shown, quote=True)


def embedded_json(value: Any) -> str:
    """Return JSON that can stand in a <script> element: no part of it is read as HTML.

    >>> embedded_json({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    told = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    return told.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
