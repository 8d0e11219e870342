"""Whom a request is served for: the scheduler shares fairly between tenants."""

from __future__ import annotations

from hashlib import blake2b

DIGEST_SIZE = 8  # bytes


def tenant_of(key: str | None, user: str | None) -> str:
    """A name for the API key's name and the body's `user` together; "" if there is neither.

    Never the key itself, and of `user` a digest: clients may put anything there, of any length.
    """
    name = key or ""
    if not user:
        return name
    return f"{name}/{blake2b(user.encode(), digest_size=DIGEST_SIZE).hexdigest()}"
