"""The order of the samples of an epoch; imports no torch."""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

NUM_ROUNDS = 10


class Order:
    """Permutes the samples of an epoch: `order[place]` is the sample at `place`, both in [0, num_samples).

    It depends on (num_samples, seed, epoch) alone; with `shuffle = False` it is the identity. The place of a sample is
    computed, not looked up: an epoch of any size needs no memory and can be entered at any place.

    The permutation is a Feistel network over pairs (left, right) of [0, a)^2 with a = ceil(sqrt(n)), applied again while the
    result is not below n (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): a^2 / n times on average,
    close to 1 for large n. The round function is BLAKE2b. There are ten rounds, as in NIST SP 800-38G: small domains need more
    than the four that suffice for large ones.
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        assert num_samples > 0, num_samples
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._side = isqrt(num_samples - 1) + 1
        self._key = blake2b(f"order/{seed}/{epoch}".encode(), digest_size=32).digest()

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, place: int) -> int:
        """Returns the sample at `place`, in constant time on average; raises IndexError outside [0, num_samples)."""
        if not 0 <= place < self._num_samples:
            raise IndexError(place)
        if not self._shuffle:
            return place
        sample = self._network(place)
        while sample >= self._num_samples:
            sample = self._network(sample)
        return sample

    def _network(self, value: int) -> int:
        """Returns the Feistel network's permutation of `value`, both in [0, side^2)."""
        left, right = divmod(value, self._side)
        for number in range(NUM_ROUNDS):
            left, right = right, (left + self._round(number, right)) % self._side
        return left * self._side + right

    def _round(self, number: int, value: int) -> int:
        digest = blake2b(value.to_bytes(8, "little"), digest_size=8, key=self._key, salt=bytes([number])).digest()
        return int.from_bytes(digest, "little")
