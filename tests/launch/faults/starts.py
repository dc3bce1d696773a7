"""Programs that cannot be started or found, or import what is not there."""

from faults.fault import PROLOGUE, Fault

STARTS = (
    Fault(
        name="import",
        source="""
            if bad:
                import model
            wait()
        """,
        files=(("model.py", "width = 64\ndepth = width / 0  # here\n"),),
        first="{last} failed: ZeroDivisionError: division by zero",
        details=("{here}", "depth = width / 0", "import model"),
        ranks=(3,),
    ),
    Fault(
        name="syntax-error",
        source="""
            if bad:
                import model
            wait()
        """,
        files=(("model.py", "width = 64\nlayers = range(3:  # here\n"),),
        first="{last} failed: SyntaxError: ",
        details=("{here}", "layers = range(3:"),
    ),
    Fault(
        name="missing-import",
        source="""
            import no_such_package  # here
        """,
        prologue=False,
        first="{all} failed: ModuleNotFoundError: No module named 'no_such_package'",
        details=("{here}",),
    ),
    Fault(
        name="missing-script",
        source="",
        target=("no_such_script.py",),
        first="no such file: 'no_such_script.py'",
        codes=(2,),
        one_line=True,
    ),
    Fault(
        name="missing-module",
        source="",
        target=("-m", "no_such_module"),
        first="no module named 'no_such_module'",
        codes=(2,),
        one_line=True,
    ),
    Fault(
        name="module",
        source="",
        target=("-m", "train"),
        files=(("train.py", PROLOGUE + "if bad:\n    raise ValueError('bad batch 7')  # here\nwait()\n"),),
        first="{last} failed: ValueError: bad batch 7",
        details=("{here}",),
    ),
    Fault(
        name="spawned-interpreter",
        ranks=(),
        source="""
            if bad:
                raise ValueError("bad batch 7")  # here
            wait()
        """,
        options=("--start-method", "spawn"),
        first="{last} failed: ValueError: bad batch 7",
        details=("{here}",),
    ),
    Fault(
        name="other-program",
        ranks=(),
        source="",
        files=(
            ("job.sh", 'if [ "$RANK" = $((WORLD_SIZE - 1)) ]; then echo "disk is full" >&2; exit 9; fi; sleep 60\n'),
        ),
        target=("--no-python", "sh", "job.sh"),
        first="{last} exited with code 9",
        details=("disk is full",),
        codes=(9,),
        quiet=False,
    ),
)
