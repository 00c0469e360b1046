"""hyflash: language models answer faster, token for token the same."""

__version__ = "0.1.0"
