"""Has the kernel refuse to fork after the first FORKS times, as at a limit of processes. For `--preload`.

The limits themselves do not bind root, and a control group of its own needs a right; a seccomp filter needs neither.
"""

import ctypes
import errno
import os
import platform
import struct

_CALLS = {"x86_64": (56, 57, 435), "aarch64": (220, 435)}[platform.machine()]  # clone, fork, clone3
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def _refuse():
    number = len(_CALLS)
    lines = [(_LOAD, 0, 0, 0), *((_EQUAL, number - place, 0, call) for place, call in enumerate(_CALLS))]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | errno.EAGAIN)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(_Filter(len(lines), ctypes.addressof(code))), 0, 0) == 0


_left = int(os.environ["FORKS"])


def _count():
    global _left  # noqa: PLW0603
    _left -= 1
    if _left == -1:
        _refuse()


os.register_at_fork(before=_count)
