from __future__ import annotations

from services.batch.custom_ids import CustomIds, Place


def test_new_done_and_duplicate() -> None:
    ids = CustomIds()
    ids.done("before")
    ids.done("before")
    assert [ids.take("before"), ids.take("before")] == [Place.DONE, Place.DUPLICATE]
    assert [ids.take("a"), ids.take("A"), ids.take("a")] == [Place.NEW, Place.NEW, Place.DUPLICATE]
    assert [ids.take("\ud800"), ids.take("\ud800")] == [Place.NEW, Place.DUPLICATE]
    ids.close()
