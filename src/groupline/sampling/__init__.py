"""Sampling: token ids in, Completions out. No text, no rewards."""

from groupline.sampling.engine import Engine
from groupline.sampling.sampler import Elsewhere, Sampler, SamplerError

__all__ = ["Elsewhere", "Engine", "Sampler", "SamplerError"]
