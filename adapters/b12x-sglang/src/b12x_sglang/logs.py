"""What the adapter says in SGLang's log."""

from __future__ import annotations

import functools
import logging

_logger = logging.getLogger("sglang.b12x")


@functools.cache
def say_served(layers: str, scheme: str) -> None:
    """Say once a process that some kind of layers is served in a scheme."""
    _logger.info("b12x serves %s as %s", layers, scheme)
