"""A model directory as a causal language model in memory.

Invariant: every weight of the model comes out of the directory's files; nothing in it is run as code (E03).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from echo2.errors import UserError
from echo2.transport.model_folder import check_links, weight_files

LOG = logging.getLogger(__name__)


def load_causal_lm(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """The directory's model in ``dtype``. Raises UserError when it is none.

    transformers fills what is missing with chance; here that is refused. Never runs code from the directory, nor
    follows a name or a link out of it (E03).
    """
    files = weight_files(folder)
    check_links(folder)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its table of what is missing
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True,
        )  # fmt: skip
    except SafetensorError as error:
        raise UserError(
            f"{_broken_among(files) or folder} must be a whole safetensors file, got: {_in_one_line(error)};"
            " copy or download it again"
        ) from error
    except Exception as error:  # what is wrong in a configuration comes out as any type, from deep inside
        raise UserError(
            f"the model in {folder} must load as a causal language model, got: {_in_one_line(error)};"
            " choose another model, or bring its original files back"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, found = loaded
    if absent := sorted(found["missing_keys"]):
        raise UserError(
            f"the files in {folder} must hold all weights of the {type(model).__name__} that its config.json describes;"
            f" {len(absent)} are missing, {absent[0]} first: bring back the config.json that belongs to the weights"
        )
    if foreign := sorted(found["unexpected_keys"]):
        LOG.warning(
            "%s: %d tensors are none of the %s that config.json describes, and are left out: %s first",
            folder, len(foreign), type(model).__name__, foreign[0],
        )  # fmt: skip
    return model.to(device)


def _broken_among(files: Sequence[Path]) -> Path | None:
    """The file that safetensors does not open: its errors do not say."""
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file
    return None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".:;") or type(error).__name__
