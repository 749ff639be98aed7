"""The order of an epoch: drawn on rank 0 by the user's sampler, the same on all ranks."""
