"""`headrace tokenizer`."""

from services.tokenizer.service import TokenizerService
from shared.service import main

if __name__ == "__main__":
    main(TokenizerService)
