"""Attention under an encoding."""

from posx.attention.arguments import Slots, drop_axes, host_array
from posx.attention.attend import EXECUTORS, attend, attention_weights, batch_features, choose_executor, token_map
from posx.attention.fused import refusal
from posx.attention.history import with_previous_tokens
from posx.attention.kernel import kernel_refusal
from posx.attention.masks import Mask, causal, full, window
from posx.lazy import module_getter

__getattr__ = module_getter(__name__)

__all__ = [
    "EXECUTORS", "Mask", "Slots", "attend", "attention_weights", "batch_features", "causal", "choose_executor",
    "drop_axes", "full", "host_array", "kernel_refusal", "refusal", "token_map", "window", "with_previous_tokens",
]  # fmt: skip
