"""What Ollama's programs call a model: its name, to which they add a tag."""

from __future__ import annotations

from typing import Final

from shardnet.api.server.errors import HttpError
from shardnet.api.server.model_names import ModelNames, ServedModel

TAG: Final = ":latest"
"""What programs add to a name that has no tag."""


async def find_model(models: ModelNames, name: str | None) -> ServedModel:
    """Return the model that `name` means, with the tag or without, the default for none.

    Raises HttpError 404, with names that would do, for no model or several.
    """
    try:
        return await models.find(name)
    except HttpError:
        if name is None or not name.endswith(TAG):
            raise
    return await models.find(name.removesuffix(TAG))
