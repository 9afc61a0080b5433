"""Sampling: token ids in, Completions out. No text, no rewards."""

from groupline.sampling.engine import Engine

__all__ = ["Engine"]
