"""Makes torch know a device "sim" that works as a GPU does, on machines that have none; see simulated_device.cpp.

As a program, it runs a script on it: `simulated_device.py LIBRARY SCRIPT ARGUMENTS...`. The default device of
`Trainer` and `unisono.parallel.build` is "sim:0" there.
"""

from __future__ import annotations

import fcntl
import hashlib
import runpy
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

DEVICES = 2
SOURCE = Path(__file__).with_name("simulated_device.cpp")


def build(folder: Path) -> Path:
    """Compile the device, if that has not been done in a folder; it takes some 15 s. Return the library."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"simulated-{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # for several workers of pytest
        if not library.exists():
            made, of_torch = library.with_suffix(".tmp"), Path(torch.__file__).parent
            flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-I{of_torch / 'include'}", f"-L{of_torch / 'lib'}"]
            flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
            libraries = ["-lc10", "-ltorch_cpu", "-ltorch"]
            subprocess.run(["g++", *flags, str(SOURCE), *libraries, "-o", str(made)], check=True, timeout=300)
            made.replace(library)
    return library


def register(library: str | Path) -> None:
    """Make torch know "sim:0" and "sim:1". Changes the process."""
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend("sim")
    module: Any = types.ModuleType("torch.sim")
    module.is_available = lambda: True
    module.device_count = lambda: DEVICES
    module.current_device = lambda: 0
    module.device = lambda device: nullcontext()  # the library makes memory where it is asked for
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("sim", module)


if __name__ == "__main__":
    library, script, *rest = sys.argv[1:]
    register(library)
    import unisono

    for function in (unisono.Trainer.__init__, unisono.parallel.build):
        function.__kwdefaults__["device"] = "sim:0"
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
