"""The command line: parses, calls one function of the library, prints results on stdout and the rest on stderr.

`hyflash --help` imports neither torch nor transformers: each command imports what it needs when it runs. Every
user mistake ends in one sentence on stderr and exit 1; Ctrl-C ends in 130.
"""

from __future__ import annotations

from hyflash.cli.main import app, main

__all__ = ["app", "main"]
