"""The parts of a page with the texts and images that a run has logged. Pure. Start reading at `render_images`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.report.markup import text
from unisono.report.summary import Document
from unisono.watch.figures import format_count, plural

__all__ = ["render_images", "render_texts"]

_SHOWN = 160
"""Pixels of the longer side of an image."""
_CAPTION = 200


def render_images(document: Document, thumbnails: Mapping[str, str]) -> str:
    """Return the images of each name, from the first to the latest; empty without any.

    Args:
        document: The document of the run.
        thumbnails: The data: URL of each image, by its path; those without one are counted.
    """
    parts = []
    for name, entries in document["images"].items():
        shown = [entry for entry in entries if entry["path"] in thumbnails]
        rest = len(entries) - len(shown)
        more = f'<p class="remark">{plural(rest, "image")} not shown: see the files in images.</p>' if rest else ""
        figures = "".join(_figure(name, entry, thumbnails[entry["path"]]) for entry in shown)
        row = f'<div class="images">{figures}</div>' if figures else ""
        parts.append(f"<h3>{text(name)}</h3>{row}{more}")
    return "".join(parts)


def render_texts(document: Document) -> str:
    """Return the texts of each name, the latest first and the others folded; empty without any."""
    parts = []
    for name, entries in document["texts"].items():
        *earlier, latest = entries
        folded = "".join(map(_text, reversed(earlier)))
        of = f"<details><summary>{plural(len(earlier), 'earlier text')}</summary>{folded}</details>" if folded else ""
        parts.append(f"<h3>{text(name)}</h3>{_text(latest)}{of}")
    left_out: Sequence[str] = document["samples_left_out"]
    if left_out:
        parts.append(f'<p class="remark">{plural(len(left_out), "further name")} of texts or images not shown.</p>')
    return "".join(parts)


def _figure(name: str, entry: Mapping[str, Any], url: str) -> str:
    longest = max(entry["width"], entry["height"])
    # Small ones are enlarged by whole factors, so that their pixels can be seen.
    scale = max(1, _SHOWN // longest) if longest < _SHOWN else _SHOWN / longest
    width, height = (max(1, round(scale * entry[side])) for side in ("width", "height"))
    step, caption = f"step {format_count(entry['step'])}", entry.get("caption", "")
    caption = caption if len(caption) <= _CAPTION else f"{caption[:_CAPTION]}…"
    told = f"<span>{text(caption)}</span>" if caption else ""
    return (
        f'<figure class="image"><img src="{text(url)}" width="{width}" height="{height}" '
        f'alt="{text(name)}, {step}"><figcaption>{step}{told}</figcaption></figure>'
    )


def _text(entry: Mapping[str, Any]) -> str:
    return f'<p class="remark">step {format_count(entry["step"])}</p><pre>{text(entry["text"].expandtabs())}</pre>'
