"""The ways in which a rank can fail, each as a script that does it, and what the report must say."""

from faults.ends import ENDS
from faults.exceptions import EXCEPTIONS
from faults.fault import Fault
from faults.hangs import HANGS
from faults.starts import STARTS

__all__ = ["FAULTS", "Fault"]

FAULTS = (*EXCEPTIONS, *STARTS, *ENDS, *HANGS)
