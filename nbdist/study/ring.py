"""The rounds of a ring all_reduce: who holds the sum of how many ranks of which part. Pure.

Of n ranks each cuts its tensor into n parts. In n - 1 rounds each sends one part to the next rank,
which adds its own: then each holds one whole sum. In n - 1 more the sums go around.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009).
"""


def rounds_of(n: int) -> list[list[list[int]]]:
    """Return, before the first round and after each, by rank and part the ranks in its sum.

    Args:
        n: Ranks, from 2.
    """
    held = [[1] * n for _ in range(n)]
    states = [[row[:] for row in held]]
    for number in range(2 * (n - 1)):
        adds = number < n - 1
        for rank in range(n):
            to, part = (rank + 1) % n, (rank - number) % n
            held[to][part] = states[-1][rank][part] + 1 if adds else n
        states.append([row[:] for row in held])
    return states
