"""Counter-based noise: a number that is a function of a seed and an output position alone.

Path: sampler.py and scripted.py. No state, so a retracted row repeats itself and a row does not
depend on its batch. Pure Python, no torch.
"""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1


def mix(value: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014) of the low 64 bits of ``value``."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (mix((seed & _MASK_64) ^ mix(position)) >> 11) / (1 << 53)
