"""Where a model lies that is named as SGLang takes it: a folder, or a name on the Hugging Face Hub.

Looks at what is on this machine and downloads nothing.
"""

from __future__ import annotations

from pathlib import Path


def model_folder(named: str) -> Path:
    """The folder of a model.

    Args:
        named: a folder, or a name such as `organisation/model` whose files are in the hub's cache,
            as after a server has loaded it.

    Returns:
        The folder; where there is none, the name as a path, for the caller to refuse.
    """
    folder = Path(named).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError:  # It comes with SGLang.
        return folder
    try:
        return Path(snapshot_download(named, local_files_only=True))
    except (OSError, ValueError):  # Not cached, or no name of the hub's.
        return folder
