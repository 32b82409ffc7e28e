"""Torch's ways to make the attention call: SDPA with its arguments for each encoding, flex attention, eager products.

* `torch-sdpa` gets the causal flag if there is no bias, else a dense float mask. A bias without learned parameters is
  made once, and its time is not measured.
* `torch-sdpa-column` gets ALiBi as a mask with one row, slope * key position, beside the causal flag. Softmax cannot
  tell this mask from ALiBi.
* `torch-sdpa-compiled` is SDPA and the making of its arguments as one compiled function.
* `torch-flex` is flex attention compiled, with a block mask, forward only on CPUs.

All run on the GPU that torch finds, else on the CPU. Each call waits for its end.

Encodings that torch users have no short code for are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import measure
from posx.encodings.alibi import alibi_slopes
from posx.encodings.angles import inverse_frequencies

if TYPE_CHECKING:
    from benchmarks.calls import Call, Case

NAMES = ("torch-sdpa", "torch-sdpa-compiled", "torch-sdpa-column", "torch-flex", "torch-eager")
WITHOUT_BIAS = ("nope", "sinusoidal", "learned", "rope")


def call(case: Case, name: str) -> Call | None:
    """Make the call; None without torch and for an encoding that is not served."""
    from benchmarks.calls import Call

    served = {"torch-sdpa-column": ("alibi",), "torch-sdpa-compiled": ("rope", "alibi", "t5")}
    if case.encoding not in served.get(name, (*WITHOUT_BIAS, "alibi", "t5")) or not measure.version("torch"):
        return None
    import torch

    torch.set_num_threads(measure.cores())
    arrays, dtype = case.arrays(), getattr(torch, case.dtype)
    with torch.device(device()):
        cotangent, *qkv = (_heads_first(arrays[x]).to(dtype) for x in ("cotangent", "q", "k", "v"))
        params = {key: torch.tensor(np.asarray(x)) for key, x in case.params.items()} if case.encoding == "t5" else {}
        attention = _attention(case, name.removesuffix("-compiled"), params)
    leaves = [x.requires_grad_() for x in (*qkv, *params.values())]
    attention = compiled(attention) if name.endswith("-compiled") else attention

    def forward() -> Any:
        with torch.no_grad():
            return finished(attention(*(x.detach() for x in qkv)))

    def gradient() -> Any:
        o = attention(*qkv)
        return finished((o, torch.autograd.grad(o, leaves, cotangent)))

    def answers() -> dict[str, np.ndarray]:
        o = forward()
        try:
            grads = gradient()[1]
        except NotImplementedError:
            return {"o": _host(o.transpose(1, 2))}
        vectors = [_host(x.transpose(1, 2)) for x in (o, *grads[:3])]
        return dict(zip("oqkv", vectors, strict=True)) | {
            key: _host(grad) for key, grad in zip(params, grads[3:], strict=True)
        }

    return Call(forward, gradient, answers)


def device() -> str:
    """Return torch's name of the device that all its contestants use."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def finished(result: Any) -> Any:
    """Return `result` when the device has computed it."""
    import torch

    if device() == "cuda":
        torch.cuda.synchronize()
    return result


def _host(x: Any) -> np.ndarray:
    return x.detach().double().cpu().numpy()


def _heads_first(x: np.ndarray) -> Any:
    """Copy [b, t, h, d] to a contiguous tensor [b, h, t, d], torch's layout."""
    import torch

    return torch.tensor(x).transpose(1, 2).contiguous()


def _attention(case: Case, name: str, params: dict[str, Any]) -> Callable[..., Any]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    turn = _rotation(case) if case.encoding == "rope" else lambda x: x
    if name == "torch-sdpa-column":
        column = _slopes(case) * torch.arange(case.length, dtype=torch.float32)
        column = column[None].to(getattr(torch, case.dtype))
        return lambda q, k, v: sdpa(q, k, v, attn_mask=column, is_causal=True)
    if name == "torch-sdpa" and case.encoding in WITHOUT_BIAS:
        return lambda q, k, v: sdpa(turn(q), turn(k), v, is_causal=True)
    if name == "torch-flex":
        return _flex(case, params, turn)
    mask = _mask(case, params)
    if name == "torch-sdpa":
        return lambda q, k, v: sdpa(q, k, v, attn_mask=mask())

    def eager(q: Any, k: Any, v: Any) -> Any:
        s = turn(q) @ turn(k).transpose(-1, -2) / math.sqrt(case.head_dim) + mask()
        return torch.softmax(s, dim=-1) @ v

    return eager


def _flex(case: Case, params: dict[str, Any], turn: Callable[[Any], Any]) -> Callable[..., Any]:
    """Change scores inside the kernel, which does not visit tiles beyond the diagonal."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes, change = _slopes(case).flatten(), None
    if case.encoding == "alibi":
        change = lambda s, b, h, i, j: s - slopes[h] * (i - j)  # noqa: E731
    if case.encoding == "t5":
        buckets, table = _buckets(case), params["table"]
        table = table.detach() if device() == "cpu" else table  # there it has no gradients
        change = lambda s, b, h, i, j: s + table[buckets[(i - j).clamp(min=0)], h]  # noqa: E731
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.length, case.length, device=device())
    call: Callable[..., Any] = compiled(flex_attention)
    return lambda q, k, v: call(turn(q), turn(k), v, score_mod=change, block_mask=causal)


def _buckets(case: Case) -> Any:
    """Return T5's bucket of every distance, int64 [length]."""
    import torch

    return torch.tensor(np.asarray(case.value.bucket(np.arange(case.length, dtype=np.float32)))).long()


def _slopes(case: Case) -> Any:
    import torch

    return torch.tensor(alibi_slopes(case.heads), dtype=torch.float32)[:, None, None]


def _mask(case: Case, params: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that makes the dense float mask [1, h or 1, q, k], minus infinity in the future."""
    import torch

    dtype, pos = getattr(torch, case.dtype), torch.arange(case.length)
    distance = pos[:, None] - pos[None, :]
    future = distance < 0
    if case.encoding == "t5":
        index = _buckets(case)[distance.clamp(min=0)]
        return lambda: params["table"][index].permute(2, 0, 1).masked_fill(future, -math.inf)[None].to(dtype)
    bias = -_slopes(case) * distance if case.encoding == "alibi" else torch.zeros(1, *distance.shape)
    fixed = bias.masked_fill(future, -math.inf)[None].to(dtype)
    return lambda: fixed


def _rotation(case: Case) -> Callable[[Any], Any]:
    """Return the rotary embedding of [b, h, t, d], planes (c, c + d/2), angles made once."""
    import torch

    theta = torch.tensor(inverse_frequencies(case.value.base, case.head_dim))
    angles = (torch.arange(case.length)[:, None] * theta[None]).repeat(1, 2)
    cos, sin = (wave(angles).to(getattr(torch, case.dtype)) for wave in (torch.cos, torch.sin))

    def turn(x: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    return turn


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile by torch.compile, for the shapes it gets. It never falls back to eager calls silently."""
    import torch

    config = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = 1000  # contestants share the library's functions
    config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False)
