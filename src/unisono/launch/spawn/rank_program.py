"""The program that ranks of `unisono.spawn` run, as `__main__`: it calls the caller's function with the rank.

Arguments: the numbers of two open files, the packed call and the one for reports.
"""

from __future__ import annotations

import os
import sys
import traceback

from unisono.launch.spawn.function_call import RankReport, append_report, unpack


def main(packed: int, reports: int) -> None:
    """Call the function. An exception of it is reported to the caller, which shows it, and ends this rank."""
    rank, pid = int(os.environ["RANK"]), os.getpid()
    append_report(reports, RankReport(rank=rank, pid=pid))
    try:
        call = unpack(os.pread(packed, os.fstat(packed).st_size, 0))
        call.function(rank, *call.arguments)
    except KeyboardInterrupt:
        pass  # the caller was interrupted, and reports that
    except Exception:  # any exception of the caller's function is reported and raised again
        append_report(reports, RankReport(rank=rank, pid=pid, traceback=traceback.format_exc()))
        sys.excepthook = lambda *_: None
        raise


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
