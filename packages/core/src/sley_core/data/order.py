"""The order of the samples of an epoch; imports no torch."""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

NUM_ROUNDS = 10


class Order:
    """A permutation of the samples of an epoch: `order[position]` is a sample, both in [0, num_samples).

    The permutation depends only on (num_samples, seed, epoch); with `shuffle = False` it is the identity. Items are computed,
    so an epoch of any size needs no memory and can start at any position.

    The permutation is a Feistel network over pairs (left, right) of [0, a)^2 with a = ceil(sqrt(n)), repeated until the result
    is below n (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): a^2 / n times on average, close to 1
    for large n. The round function is BLAKE2b. Small domains need ten rounds, as in NIST SP 800-38G.
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        assert num_samples > 0, num_samples
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._side = isqrt(num_samples - 1) + 1
        self._key = blake2b(f"order/{seed}/{epoch}".encode(), digest_size=32).digest()

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: int) -> int:
        """Returns the sample at `position`, in constant time on average. Raises IndexError outside [0, num_samples)."""
        if not 0 <= position < self._num_samples:
            raise IndexError(position)
        if not self._shuffle:
            return position
        sample = self._permute(position)
        while sample >= self._num_samples:
            sample = self._permute(sample)
        return sample

    def _permute(self, value: int) -> int:
        """Applies the Feistel network to `value`; argument and result are in [0, side^2)."""
        left, right = divmod(value, self._side)
        for number in range(NUM_ROUNDS):
            left, right = right, (left + self._hash_round(number, right)) % self._side
        return left * self._side + right

    def _hash_round(self, number: int, value: int) -> int:
        digest = blake2b(value.to_bytes(8, "little"), digest_size=8, key=self._key, salt=bytes([number])).digest()
        return int.from_bytes(digest, "little")
