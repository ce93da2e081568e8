"""The `pagoda::` operators: importing this package registers them (schema, fake, reference, CPU kernel).

In graphs they are ``torch.ops.pagoda.attention`` and ``torch.ops.pagoda.paged_attention``; the functions of the
same names in the modules ``attention`` and ``paged_attention`` add defaults and the documentation.
"""

from __future__ import annotations

from . import attention, paged_attention
from .reference import attention_reference, paged_attention_reference

__all__ = ["attention", "attention_reference", "paged_attention", "paged_attention_reference"]
