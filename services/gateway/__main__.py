"""`python -m services.gateway`: run a gateway as this process."""

from __future__ import annotations

from services.gateway.service import GatewayService
from shared.service import main

if __name__ == "__main__":
    main(GatewayService)
