"""Numbers too large to write out: 9^{9^{9}} is short as text, and computing it takes all the time and memory there is."""

from __future__ import annotations

import math

from sympy import Add, Basic, Float, MatrixBase, Mul, Pow, Rational, factorial

MAX_DIGITS = 100_000


def log10_size(expression: Basic) -> float:
    """Upper bound of the digits of a constant, from its parts and without computing it; letters count as 1."""
    if isinstance(expression, Rational):
        return math.log10(max(abs(expression.p), expression.q, 1))
    if isinstance(expression, Float):
        return abs(math.log10(abs(float(expression)))) if math.isfinite(float(expression)) and expression else 0.0
    sizes = [log10_size(argument) for argument in expression.args]
    if isinstance(expression, Mul):
        return sum(sizes)
    if isinstance(expression, Add):
        return max(sizes) + math.log10(len(sizes))
    if isinstance(expression, Pow):
        return _of_power(sizes[0], sizes[1])
    if isinstance(expression, factorial):
        return _of_power(sizes[0], sizes[0])  # n! <= n^n
    return max(sizes, default=0.0)


def _of_power(log_base: float, log_exponent: float) -> float:
    return log_base * 10.0**log_exponent if log_base and log_exponent < 300 else log_base and math.inf


def too_large(expression: object) -> bool:
    """Whether some part of the expression has more digits than any answer does."""
    if isinstance(expression, MatrixBase):
        return any(too_large(element) for element in expression.flat())
    return isinstance(expression, Basic) and log10_size(expression) > MAX_DIGITS
