"""Integer arithmetic that torch-free and torch code share."""


def divide_up(a: int, b: int) -> int:
    """Smallest integer >= a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of b that is >= a."""
    return -(-a // b) * b
