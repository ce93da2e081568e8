"""HTTP/1.1 connections of uvicorn with additional timers and limits."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ..settings import Settings
from .errors import ApiError
from .response_cycle import ResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of the request line and headers."""

_RESET = struct.pack("ii", 1, 0)
"""``struct linger``: on, for no second."""

BODY_GRACE = 5.0
"""Seconds after ``body_timeout`` in which the application itself may answer 408."""

MAX_DISCARDED = 256 * 2**20
"""Bytes of a body that are read and dropped after the response, so that its sender can read it."""

MIN_TAKEN = 48 * 1024
"""Bytes of a full write buffer that a reader must take within ``stream_stall_timeout``: from its high water mark (64
KiB) to its low one (16 KiB), where writing resumes."""


def http_protocol(settings: Settings) -> type[HttpToolsProtocol]:
    """The protocol class for a server's connections.

    It ends connections whose headers or bodies take too long, or whose reader hardly reads, and refuses more than
    ``max_connections``. It puts ``abort`` into ``scope["state"]``: a function that drops the connection and all
    unsent data.
    """

    class HttpProtocol(HttpToolsProtocol):
        """One connection."""

        _timer: asyncio.TimerHandle | None = None
        _last_timer: asyncio.TimerHandle | None = None
        _reader_timer: asyncio.TimerHandle | None = None
        _running: RequestResponseCycle | None = None
        _is_lost = False
        _in_message = False
        _in_body = False
        _head_bytes = 0
        _discarded = 0
        _closes_behind_body = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                error = ApiError(
                    503,
                    "too_many_connections",
                    f"{settings.max_connections} connections are open; close some, or retry later.",
                    headers={"retry-after": "1"},
                )
                self._answer(error)
                return
            self._arm(settings.header_timeout)

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            self._stop_watching_reader()
            self._is_lost = True
            if self._last_timer is not None:
                self._last_timer.cancel()  # it would keep a connection that is gone in memory
            self._unset_keepalive_if_required()  # likewise
            if self._running is not None and not self._running.response_complete:
                self._running.disconnected = True  # uvicorn tells the last request alone, which may wait behind it
                self._running.message_event.set()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if not self._in_message and self._timer is None and not self._answering:
                self._arm(settings.header_timeout)
            if not self._in_body:
                self._head_bytes += len(data)
            elif not self._answering:
                self._discarded += len(data)
                if self._discarded > MAX_DISCARDED:
                    self._drop()
                    return
            super().data_received(data)
            if not self._in_body and self._head_bytes > MAX_HEAD_BYTES and self._in_message:
                self._answer(
                    ApiError(431, "headers_too_large", f"The headers exceed {MAX_HEAD_BYTES} bytes; send fewer.")
                )

        def on_message_begin(self) -> None:
            self._in_message = True
            super().on_message_begin()
            self.scope["state"]["abort"] = self._drop

        def on_headers_complete(self) -> None:
            self._disarm()
            # Those who wait for the body answer 408 before this, which also ends bodies that nobody reads.
            self._arm(settings.body_timeout + BODY_GRACE)
            self._in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._disarm()
            self._in_message = self._in_body = False
            self._head_bytes = self._discarded = 0
            super().on_message_complete()
            if self._closes_behind_body:
                self._close()

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self._running = cycle
            cycle.__class__ = ResponseCycle
            cycle.keeps_open = self._keeps_open  # type: ignore[attr-defined]
            super()._start_asgi_task(cycle, app)

        def _keeps_open(self) -> bool:
            self._closes_behind_body = self._in_body and self._running is self.cycle
            return self._closes_behind_body

        def _close(self) -> None:
            self.transport.close()
            self._abort_later()

        @property
        def _answering(self) -> bool:
            """Whether the response of an earlier request is still in progress."""
            return self.cycle is not None and not self.cycle.response_complete

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._head_bytes and not self._in_message and self._timer is None:
                self._arm(settings.header_timeout)  # something came meanwhile that is no request yet
            if self.transport.is_closing():
                self._abort_later()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader()

        def resume_writing(self) -> None:
            self._stop_watching_reader()
            super().resume_writing()

        def _watch_reader(self) -> None:
            """Drop the connection if its peer reads less than ``MIN_TAKEN`` until the timeout."""
            left = self.transport.get_write_buffer_size()
            self._reader_timer = self.loop.call_later(settings.stream_stall_timeout, self._look_at_reader, left)

        def _look_at_reader(self, before: int) -> None:
            if before - self.transport.get_write_buffer_size() < MIN_TAKEN:
                self._drop()
            else:
                self._watch_reader()

        def _stop_watching_reader(self) -> None:
            if self._reader_timer is not None:
                self._reader_timer.cancel()
                self._reader_timer = None

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._abort_later()

        def send_400_response(self, msg: str) -> None:
            self._answer(ApiError(400, "invalid_http", "Invalid HTTP/1.1 request."))

        def _answer(self, error: ApiError) -> None:
            """Write a response without the application, and close."""
            if self._running is not None and self._running.response_started and not self._running.response_complete:
                self.transport.abort()  # an answer is under way, into which no other can be written
                return
            body = msgspec.json.encode(error.body())
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            lines = [f"{name}: {value}\r\n".encode() for name, value in {**headers, **(error.headers or {})}.items()]
            self.transport.write(b"".join([STATUS_LINE[error.status_code], *lines, b"\r\n", body]))
            self._close()

        def _abort_later(self) -> None:
            """Drop the connection if its peer does not read the rest; a close alone would wait."""
            # An answer may be complete only after its connection was lost.
            if self._last_timer is None and not self._is_lost:
                self._last_timer = self.loop.call_later(settings.stream_stall_timeout, self._drop)

        def _drop(self) -> None:
            """Reset the connection, so that the operating system also drops unsent data."""
            if self._is_lost:
                return
            sock = self.transport.get_extra_info("socket")
            if sock is not None:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()

        def _arm(self, seconds: float) -> None:
            self._timer = self.loop.call_later(seconds, self._too_slow)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if self.transport.is_closing():
                return
            if self._in_body and not self._answering:
                self._close()
                return
            self._answer(ApiError(408, "request_timeout", "Timed out while reading the request."))

    return HttpProtocol


def uvicorn_options(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of ``uvicorn.Config`` for these settings."""
    return {
        "http": http_protocol(settings),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": settings.keep_alive_timeout,
        "timeout_graceful_shutdown": 2,
        "backlog": 2048,
        "root_path": settings.root_path,
    }
