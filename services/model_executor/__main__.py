"""`headrace model-executor`."""

import os

# OpenMP reads it when torch is imported. A thread that waits at a barrier spins for some ms by
# default, and keeps the core from the very thread that it waits for if other processes want the
# cores too: a 256-token prefill then took ten times as long. This short, nothing is lost alone.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if __name__ == "__main__":
    from services.model_executor.service import ModelExecutorService
    from shared.service import main

    main(ModelExecutorService)
