"""Before any test module is imported: reproducible matrix products, and no progress bars on stderr.

MKL reads its mode at its first call, which may be in any test; a command line sets it before it loads a target.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # comparing with a subprocess bit for bit needs equal thread counts
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import pytest

from hyflash import environment
from hyflash.cli.main import calm_libraries

calm_libraries()


@pytest.fixture(autouse=True)
def no_line_on_missing_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what commands print hold with the CPU kernels and without; that line has tests of its own."""
    if environment.kernels_missing():
        monkeypatch.setattr("hyflash.cli.loading.fallback", lambda _note, *, quiet: None)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for the module's throw-away models, whose packed weights do not belong into the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
