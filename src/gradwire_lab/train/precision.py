"""Precision: autocast as a recipe's ``train.precision`` asks for, and the seed of a pass's random numbers."""

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str, cache: bool = True) -> torch.autocast:
    """Compute in 16 bits where the precision is one of these; a captured pass must not cache what it casts."""
    dtype = DTYPES.get(precision)
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=cache)


def reseed(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Let the random numbers of a pass depend on (seed, step, rank) alone."""
    number = ((seed * 1_000_003 + step) * 65_537 + rank) % 2**63
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(number)
    torch.default_generator.manual_seed(number)
