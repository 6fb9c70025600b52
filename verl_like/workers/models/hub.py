"""Asks the hub whether it has a model, with a deadline. transformers would try for a minute if the
hub does not answer."""

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import RemoteEntryNotFoundError

from verl_like.single_controller.network import error_of

_ANSWER_S = 8.0
"""How long the hub may take to answer."""


def require_hub_model(name: str, setting: str, *files: str) -> None:
    """Raises ValueError unless a model is in this machine's cache, or the hub says within
    `_ANSWER_S` seconds that it has the model.

    `setting` is the configuration key and its value, for the message. Without `files` it looks for
    the model's `config.json`. `files` are files of a tokenizer: one of them in the cache is enough,
    and the hub may lack them.
    """
    if constants.HF_HUB_OFFLINE:
        return  # the loader will look into the cache alone
    asked = files or ("config.json",)

    def ask() -> None:
        cached = [try_to_load_from_cache(name, file) for file in asked]
        is_cached = any(isinstance(path, str) for path in cached)
        if not is_cached:
            url = hf_hub_url(name, asked[0])
            get_hf_file_metadata(url, timeout=_ANSWER_S)

    error = error_of(ask, _ANSWER_S, "ask the hub")
    if files and isinstance(error, RemoteEntryNotFoundError):
        return  # the hub has the model, but not the file
    if error is not None:
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ValueError(
            f"{setting}: neither a folder, nor a model in this machine's cache, nor one that "
            f"{constants.ENDPOINT} gives ({reason}); give the folder of a model, correct the "
            "name, or download it first: hf download."
        ) from error
