"""Objects of the loaded libraries, taken out of what Python's garbage collector looks through."""

from __future__ import annotations

import gc


def freeze_objects() -> None:
    """Let later collections pass over everything that there is now.

    A full one looks at each of the million objects of the libraries that a server loads, which stops all of its
    streams for 150 ms, in the middle of a burst of requests as likely as not.
    """
    gc.collect()
    gc.freeze()
