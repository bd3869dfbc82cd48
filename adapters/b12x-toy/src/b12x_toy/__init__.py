"""The smallest b12x adapter: Hugging Face transformers with the ops of `b12x_core` swapped in."""

SERVES = "==5.24.0"
"""Versions of transformers (PEP 440) that this adapter was proven with."""
