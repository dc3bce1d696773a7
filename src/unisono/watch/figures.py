"""Numbers formatted for people. Pure functions; the texts are short and of nearly constant width."""

from __future__ import annotations

import math

__all__ = [
    "format_bytes",
    "format_clock",
    "format_count",
    "format_elapsed",
    "format_rate",
    "format_ratio",
    "format_value",
    "plural",
]


def format_count(count: int) -> str:
    """Format a number of things: exact below a million, then four digits.

    >>> [format_count(n) for n in (7, 27_098, 124_439_808, 70_553_706_496)]
    ['7', '27,098', '124.4 M', '70.55 B']
    """
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,}"


def format_bytes(nbytes: int) -> str:
    """Format a size of memory in powers of ten, with three digits.

    >>> [format_bytes(n) for n in (950_000, 251_658_240, 1_310_720_000, 139_586_437_120)]
    ['0.95 MB', '252 MB', '1.31 GB', '140 GB']
    """
    size, unit = (nbytes / 1e9, "GB") if nbytes >= 999.5e6 else (nbytes / 1e6, "MB")
    return f"{size:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f} {unit}"


def format_rate(per_s: float) -> str:
    """Format a number of things per second: three digits, or all those before the point.

    >>> [format_rate(r) for r in (8412.3, 84.123, 8.4123, 0.084)]
    ['8,412', '84.1', '8.41', '0.08']
    """
    if not math.isfinite(per_s):
        return "-"
    return f"{per_s:,.0f}" if per_s >= 99.95 else f"{per_s:.1f}" if per_s >= 9.995 else f"{per_s:.2f}"


def format_elapsed(seconds: float) -> str:
    """Format a duration: seconds with a tenth up to a minute, then as a clock.

    >>> [format_elapsed(s) for s in (0.94, 59.94, 59.97, 125, 93_784)]
    ['0.9 s', '59.9 s', '0:01:00', '0:02:05', '26:03:04']
    """
    return f"{seconds:.1f} s" if seconds < 59.95 else format_clock(seconds)


def format_clock(seconds: float) -> str:
    """Format hours, minutes and seconds.

    >>> [format_clock(s) for s in (4.2, 125, 93_784)]
    ['0:00:04', '0:02:05', '26:03:04']
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def format_value(value: float) -> str:
    """Format a loss or a metric with five digits, six characters wide between 0 and 10,000.

    >>> [format_value(v) for v in (0.41318, 12.3456, 1234.56, 0.0, 0.00012, 123456.0, float("nan"))]
    ['0.4132', '12.346', '1234.6', '0.0000', '1.20e-04', '1.23e+05', 'nan']
    """
    size = abs(value)
    if not math.isfinite(value):
        return str(float(value))
    if size and not 0.001 <= size < 9999.95:
        return f"{value:.2e}"
    decimals = 4 if size < 9.99995 else 3 if size < 99.9995 else 2 if size < 999.995 else 1
    return f"{value:.{decimals}f}"


def format_ratio(total: float, count: float) -> str:
    """Format the two whole numbers of a share; "" for a mean of other values, whose sum is of no interest.

    >>> format_ratio(328.0, 360), format_ratio(26925.1306, 12800), format_ratio(500.0, 360)
    ('328/360', '', '')
    """
    counts = math.isfinite(total) and math.isfinite(count) and total == int(total) and count == int(count)
    return f"{int(total)}/{int(count)}" if counts and 0 <= total <= count else ""


def plural(count: int, thing: str) -> str:
    """Format a count and the name of the things, in the plural unless the count is 1.

    >>> plural(1, "rank"), plural(27_098, "parameter")
    ('1 rank', '27,098 parameters')
    """
    return f"{format_count(count)} {thing}{'' if count == 1 else 's'}"
