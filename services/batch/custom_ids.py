"""Which requests were seen: on disk, as a batch may have more of them than fit into memory."""

from __future__ import annotations

import sqlite3
from enum import Enum


class Place(Enum):
    NEW = "new"
    DONE = "done"  # by a former run
    DUPLICATE = "duplicate"  # of an earlier line


class CustomIds:
    def __init__(self) -> None:
        # Without a name it is a temporary file, of which a part is in memory; it ends with us.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode=OFF")
        self._database.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, seen INT) WITHOUT ROWID")

    def done(self, custom_id: str) -> None:
        """A former run has answered it."""
        insert = "INSERT OR IGNORE INTO ids VALUES (?, 0)"
        self._database.execute(insert, (_key(custom_id),))

    def take(self, custom_id: str) -> Place:
        """What the next input line with this id is."""
        key = (_key(custom_id),)
        row = self._database.execute("SELECT seen FROM ids WHERE id = ?", key).fetchone()
        if row is None:
            self._database.execute("INSERT INTO ids VALUES (?, 1)", key)
            return Place.NEW
        self._database.execute("UPDATE ids SET seen = 1 WHERE id = ?", key)
        return Place.DUPLICATE if row[0] else Place.DONE

    def close(self) -> None:
        self._database.close()


def _key(custom_id: str) -> bytes:
    return custom_id.encode(errors="surrogatepass")
