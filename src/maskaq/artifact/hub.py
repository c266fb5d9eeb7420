"""Saved models on the Hugging Face hub: a repository is a folder of `save_pretrained`, its README the model card."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maskaq.errors import DependencyError, PretrainedError, first_line
from maskaq.models.hub import hub_or_cache

_REPOSITORY = r"[\w.-]+/[\w.-]+"
FILES = ("config.json", "model.safetensors", "README.md")


def is_repository(name: Any) -> bool:
    """Whether a name can only be that of a repository: USER/REPO, and no folder here."""
    return isinstance(name, str) and re.fullmatch(_REPOSITORY, name) is not None and not os.path.exists(name)


@contextmanager
def downloaded(repository: str) -> Iterator[Path]:
    """The files of a repository, in a folder for as long as the context lasts; PretrainedError if they cannot be had.

    They are copied: the hub's cache holds links, and a saved model is read from files alone.
    """
    hub = _hub()
    try:
        with hub_or_cache():
            cached = Path(hub.HfApi().snapshot_download(repository, allow_patterns=list(FILES)))
    except Exception as error:  # not there, private, no network: many classes, one remedy
        raise PretrainedError(
            f"{repository} is no folder here, and cannot be had from the hub: {first_line(error)}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="maskaq-") as folder:
        for name in FILES:
            if (cached / name).exists():
                shutil.copyfile(cached / name, Path(folder) / name)
        yield Path(folder)


def upload(folder: str | Path, repository: str, title: str, *, private: bool = False) -> str:
    """Upload a saved model with its card; the address of the commit. A repository that is not there is made."""
    if re.fullmatch(_REPOSITORY, str(repository)) is None:
        raise PretrainedError(f"expected the name of a repository, USER/REPO, got {repository!r}")
    hub = _hub()
    hub.ModelCard.load(Path(folder) / FILES[-1])  # a card that the hub cannot read fails here
    try:
        api = hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        found = api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            allow_patterns=list(FILES),
            commit_message=f"Upload {title}",
        )
    except Exception as error:
        raise PretrainedError(f"{folder} cannot be uploaded to {repository}: {first_line(error)}") from error
    return str(found)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise DependencyError("the hub needs huggingface_hub: pip install huggingface_hub") from error
    return huggingface_hub
