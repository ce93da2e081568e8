"""State shared by the routes of one server; there are no globals."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...runtime.requests.template_facts import TemplateFacts, probe_template
from ..engine_process.client import EngineClient, EngineUnavailable
from ..formats.registry import AnyFormat
from ..http.errors import ApiError
from ..monitoring.logs import RequestLog
from ..monitoring.metrics import ServerMetrics
from ..monitoring.request_record import RequestRecord
from ..monitoring.request_watch import RequestWatch
from ..monitoring.tracing import TRACE_HEADERS, RequestTracer
from ..page.markdown_process import MarkdownRenderer
from ..settings import Settings
from .admission import Admission
from .grammars import Grammars
from .prompts import Prompts

if TYPE_CHECKING:
    from .generate import Generation


_MOST_BUCKETS_FOR = 2**20
"""Maximum tokens of the histograms until the engine reports its limit."""


class Front:
    """One server's state.

    Args:
        settings: the server's settings.
        client: client of its engine.
        tokenizer: a HuggingFace tokenizer, or None.
        formats: formats of tool calls and reasoning; None: unknown.
        log: log of finished requests.
        tracer: tracer of finished requests.
    """

    def __init__(
        self,
        settings: Settings,
        client: EngineClient,
        tokenizer: Any,
        *,
        formats: AnyFormat | None = None,
        log: RequestLog | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.settings, self.client, self.tokenizer, self.formats = settings, client, tokenizer, formats
        self.log = RequestLog() if log is None else log
        self.tracer = tracer
        try:
            longest = client.hello.max_model_len
        except EngineUnavailable:
            longest = _MOST_BUCKETS_FOR
        self.metrics = ServerMetrics(client, settings.model_name, longest, settings.metrics_prefix)
        self.renderer = MarkdownRenderer()
        """Renderer of the chat page."""
        self.grammars = Grammars(tokenizer, self.metrics.observe_grammar)
        self.prompts = Prompts(tokenizer, settings.chat_template, settings.chat_template_kwargs)
        self.admission = Admission(settings, client)
        self.generations: set[Generation] = set()
        """Generations in progress."""
        self.ignored_fields: set[str] = set()
        """Fields that were logged already."""

    @cached_property
    def template_facts(self) -> TemplateFacts:
        """What the chat template accepts and writes, determined at the first use."""
        return probe_template(self.tokenizer, self.settings.chat_template)

    def close(self) -> None:
        """Release the server's resources, except the engine."""
        self.prompts.close()
        self.grammars.close()
        self.renderer.close()
        if self.tracer is not None:
            self.tracer.close()

    def begin_drain(self) -> None:
        """Refuse new requests."""
        self.admission.is_draining = True

    async def drained(self) -> None:
        """Wait until no request is in progress."""
        while self.admission.num_requests or self.generations:
            await asyncio.sleep(0.02)

    def cut(self) -> None:
        """End all requests in progress with their output so far."""
        for generation in list(self.generations):
            generation.cut()

    def model_name(self, asked: str | None) -> str:
        """The model name to answer with.

        Raises:
            ApiError: 404; the model does not exist.
        """
        if not asked:
            return self.settings.model_name
        if asked in self.settings.served_model_names:
            return asked
        names = ", ".join(self.settings.served_model_names)
        text = f"The model {asked[:100]!r} does not exist; this server serves {names}"
        raise ApiError(404, "model_not_found", text, param="model")

    def watch(self, scope: Mapping[str, Any], endpoint: str) -> RequestWatch:
        """Start a watch over a generation request, at its arrival."""
        traces = {
            name: value.decode("latin-1")
            for header, value in scope["headers"]
            if (name := header.decode("latin-1")) in TRACE_HEADERS
        }
        return RequestWatch(
            self.metrics,
            request_id=scope["state"]["request_id"],
            endpoint=endpoint,
            model=self.settings.model_name,
            key_name=key_name(scope),
            trace_headers=traces,
        )

    def ended(self, record: RequestRecord, *, prompt: object = None, output: object = None) -> None:
        """Count, log and trace a finished request."""
        self.metrics.observe(record)
        self.log.write(record, prompt=prompt, output=output)
        if self.tracer is not None:
            self.tracer.export(record)

    def new_id(self, prefix: str) -> str:
        """A new response id."""
        return f"{prefix}-{uuid.uuid4().hex}"


def key_name(scope: Mapping[str, Any]) -> str | None:
    """Name of the request's API key."""
    name = scope.get("state", {}).get("key_name")
    return name if isinstance(name, str) else None
