"""The torch library that holds the custom ops, and the one way an op is registered.

An op has an implementation for CPU tensors, which is the reference, and one for CUDA tensors, which runs the kernel
that serves the call or raises `UnsupportedError` with the sentence of `b12x_core.capabilities`. With
`B12X_REFERENCE=1` CUDA tensors run the reference too; linear layers look at it when their weights are prepared.
`torch.library.Library` is used rather than the `torch.library.custom_op` decorator because its calls cost the host a
third.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from b12x_core.capabilities import Support
from b12x_core.errors import UnsupportedError

NAMESPACE = "b12x_core"
_library = torch.library.Library(NAMESPACE, "DEF")


def eager(x: torch.Tensor) -> bool:
    """Whether the kernel of an op may be called without the dispatcher, which takes the host 4 us: nobody looks on.

    Compilers, modes and subclasses of tensors must see the op.
    """
    return (
        type(x) is torch.Tensor
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def register(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    support: Callable[..., Support] | None = None,
    kernel: Callable[..., Any] | None = None,
) -> Any:
    """Define `b12x_core::<schema>` and return the op.

    Args:
        schema: the op's schema in torch's syntax, name first.
        reference: plain torch implementation.
        fake: shapes and dtypes of the result, for tracing.
        support: for an op without kernels: with its arguments, whether the call is served.
        kernel: implementation for CUDA tensors. It raises `UnsupportedError` on a device that it does not know.
    """
    name = schema.partition("(")[0]

    assert (support is None) != (kernel is None)

    def on_cuda(*args: Any, **kwargs: Any) -> Any:
        assert support is not None
        answer = support(*args, **kwargs)
        if not answer.ok:
            raise UnsupportedError(f"{name}: {answer.reason}")
        return reference(*args, **kwargs)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, reference, "CPU")
    _library.impl(name, kernel or on_cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
