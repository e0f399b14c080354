"""Units: what people read."""

from __future__ import annotations

import pytest

from dpscope.units import GIB, MIB, format_bytes, format_duration, format_ms, format_ratio, mib


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "—"),
        (0, "0.0 MiB"),
        (32, "32 B"),
        (1536, "1.5 KiB"),
        (MIB / 16, "0.1 MiB"),
        (-3 * MIB, "-3.0 MiB"),
        (MIB, "1.0 MiB"),
        (1.5 * MIB, "1.5 MiB"),
        (512 * MIB, "512.0 MiB"),
        (GIB, "1.00 GiB"),
        (140 * GIB, "140.00 GiB"),
    ],
)
def test_bytes_are_shown_in_mib_and_from_one_gib_on_in_gib_and_trifles_are_not_rounded_to_nothing(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(None, "—"), (0.25, "0.2 ms"), (1.0, "1.0 ms"), (9999.0, "9999.0 ms"), (10_000.0, "10.00 s"), (90_000, "90.00 s")],
)
def test_times_are_shown_in_milliseconds_and_from_ten_seconds_on_in_seconds(milliseconds, text):
    assert format_ms(milliseconds) == text


@pytest.mark.parametrize(("ratio", "text"), [(None, "—"), (1.0, "1.00×"), (2.345, "2.35×"), (12, "12.00×")])
def test_a_ratio_carries_its_sign(ratio, text):
    assert format_ratio(ratio) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"), (3600, "60 min 00 s")]
)
def test_a_duration_is_shown_in_minutes_and_seconds(seconds, text):
    assert format_duration(seconds) == text


def test_a_megabyte_is_two_to_the_twentieth_bytes():
    assert mib(3 * 2**20) == 3.0
