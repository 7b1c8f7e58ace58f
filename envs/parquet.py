"""Rows of a Parquet file: the typed door to pyarrow, which is imported when it is needed."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sostenuto.errors import ConfigError, Unsupported


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Each row as a dict.  Unsupported without pyarrow, ConfigError for a file that it cannot read."""
    try:
        arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise Unsupported(
            f"{path}: reading Parquet needs pyarrow; install it with: pip install 'sostenuto[parquet]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except arrow.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a Parquet file that can be read: {error}") from error
