"""Everything that the routes of one server share; there are no globals."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .admission import Admission
from .client import EngineClient
from .errors import ApiError
from .prompts import Prompts
from .settings import Settings

if TYPE_CHECKING:
    from .generate import Generation


class Front:
    """One server's state.

    Args:
        settings: of the server.
        client: its engine.
        tokenizer: a HuggingFace tokenizer, or None.
    """

    def __init__(self, settings: Settings, client: EngineClient, tokenizer: Any) -> None:
        self.settings, self.client, self.tokenizer = settings, client, tokenizer
        self.prompts = Prompts(tokenizer, settings.chat_template, settings.chat_template_kwargs)
        self.admission = Admission(settings, client)
        self.generations: set[Generation] = set()
        """Those under way."""
        self.ignored_fields: set[str] = set()
        """Names that were logged already."""

    def close(self) -> None:
        """End what belongs to the server; the engine does not."""
        self.prompts.close()

    def begin_drain(self) -> None:
        """Take nothing new."""
        self.admission.is_draining = True

    async def drained(self) -> None:
        """Wait until nothing is under way."""
        while self.admission.num_requests or self.generations:
            await asyncio.sleep(0.02)

    def cut(self) -> None:
        """End everything that is under way with what it has."""
        for generation in list(self.generations):
            generation.cut()

    def model_name(self, asked: str | None) -> str:
        """The name to answer under.

        Raises:
            ApiError: 404; the model is not served.
        """
        if not asked:
            return self.settings.model_name
        if asked in self.settings.served_model_names:
            return asked
        raise ApiError(
            404,
            "model_not_found",
            f"The model {asked[:100]!r} does not exist; this server has {', '.join(self.settings.served_model_names)}",
            param="model",
        )

    def new_id(self, prefix: str) -> str:
        """An id for an answer."""
        return f"{prefix}-{uuid.uuid4().hex}"


def key_name(scope: Mapping[str, Any]) -> str | None:
    """Name of the key that a request came with."""
    name = scope.get("state", {}).get("key_name")
    return name if isinstance(name, str) else None
