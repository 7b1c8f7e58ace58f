"""A model of any kind from a local folder, and what of it does not fit."""

import warnings
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedModel

from sostenuto.errors import ConfigError


def load_folder(
    kind: object, directory: Path, dtype: str
) -> tuple[PreTrainedModel, dict[str, list[tuple[object, ...] | str]]]:
    """`kind`: an auto class of transformers.  Beside the model: weights that lack or have another shape.

    ConfigError for a folder that cannot be read as one.
    """
    cast("Any", transformers).utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, found = cast("Any", kind).from_pretrained(
                str(directory),
                dtype=getattr(torch, dtype),
                local_files_only=True,
                output_loading_info=True,
                # Told with the shapes, rather than raised without them.
                ignore_mismatched_sizes=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model {directory}: config.json and weights cannot be used: {error}") from error
    return module, {name: sorted(found[name]) for name in ("missing_keys", "mismatched_keys") if found[name]}
