"""Server processes of embedding tables: what ranks and servers share, and the servers' side.

A server applies row optimizers to rows in memory that it shares with the ranks of its host. Ranks hand over sums of
gradients by row, and read rows where they are. Start reading at `server.py`; the ranks' side is
`engine/shared/table_servers.py`.
"""

from unisono.servers.hand_over import RowLayout, TableUpdate, packed_nbytes, read_updates, write_updates
from unisono.servers.record import SessionRecord, TableRecord
from unisono.servers.session_control import SessionControl

__all__ = [
    "RowLayout",
    "SessionControl",
    "SessionRecord",
    "TableRecord",
    "TableUpdate",
    "packed_nbytes",
    "read_updates",
    "write_updates",
]
