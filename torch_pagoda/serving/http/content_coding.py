"""Compressed request bodies (RFC 9110, 8.4), bounded by their decoded size."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import zstandard

from .errors import ApiError

CODINGS = ("gzip", "deflate", "zstd")

_ZSTD_WINDOW = 8 * 2**20
"""Maximum window in bytes of a sender over HTTP (RFC 9659)."""
_WBITS = {"gzip": 31, "deflate": 15}


def content_coding(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The content coding of a body, one of ``CODINGS``; "" for none.

    Args:
        headers: the request's headers.

    Raises:
        ApiError: 415; another coding, or several.
    """
    values = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
    named = [name for value in values for part in value.split(",") if (name := part.strip().lower())]
    codings = [name.removeprefix("x-") for name in named if name != "identity"]
    if not codings:
        return ""
    if len(codings) > 1 or codings[0] not in CODINGS:
        raise ApiError(
            415,
            "unsupported_content_encoding",
            f"Content-Encoding {', '.join(named)[:80]!r} is not supported; use one of {', '.join(CODINGS)}, or none.",
            headers={"accept-encoding": ", ".join(CODINGS)},
        )
    return codings[0]


def decoded(body: bytes, coding: str, max_size: int) -> bytes:
    """The decoded body.

    Args:
        body: the complete encoded body.
        coding: one of ``CODINGS``.
        max_size: maximum bytes of the decoded body.

    Raises:
        ApiError: 400, the body is invalid or incomplete; 413, it is too large.
    """
    try:
        if coding == "zstd":
            whole, is_complete = _zstd(body, max_size + 1)
        else:
            inflater = zlib.decompressobj(_WBITS[coding])
            whole = inflater.decompress(body, max_size + 1)
            is_complete = inflater.eof and not inflater.unused_data
    except (zlib.error, zstandard.ZstdError) as error:
        raise _invalid(coding, str(error)[:120]) from None
    if len(whole) > max_size:
        raise too_large(max_size)
    if not is_complete:
        raise _invalid(coding, "truncated, or followed by more data")
    return whole


def too_large(max_size: int) -> ApiError:
    """A 413."""
    text = f"The body exceeds the limit of {max_size} bytes; send less, or raise --max-body-size"
    return ApiError(413, "body_too_large", text)


def _zstd(body: bytes, most: int) -> tuple[bytes, bool]:
    """The first ``most`` bytes of a frame, and whether it is complete and nothing follows it."""
    inflater = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
    found = bytearray()
    # Four bytes become at most a block of 128 KiB.
    for start in range(0, len(body), 256):
        if inflater.eof:
            return bytes(found), False
        found += inflater.decompress(body[start : start + 256])
        if len(found) >= most:
            break
    return bytes(found[:most]), inflater.eof and not inflater.unused_data


def _invalid(coding: str, reason: str) -> ApiError:
    return ApiError(400, "invalid_content_encoding", f"The body is not valid {coding}: {reason}; compress it again.")
