"""`headrace model-executor`."""

from services.model_executor.service import ModelExecutorService
from shared.service import main

if __name__ == "__main__":
    main(ModelExecutorService)
