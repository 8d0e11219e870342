"""`headrace detokenizer`."""

from services.detokenizer.service import DetokenizerService
from shared.service import main

if __name__ == "__main__":
    main(DetokenizerService)
