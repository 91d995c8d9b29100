"""Bucket counts against a count by hand."""

from common.histogram import BucketCounts


def test_buckets_count_what_is_not_above_them() -> None:
    counts = BucketCounts((1, 2.5))
    for value, times in ((0.5, 1), (1.0, 2), (2.0, 1), (9.0, 3)):
        counts.observe(value, times)
    assert counts.buckets == [("1.0", 3), ("2.5", 4), ("+Inf", 7)]
    assert counts.sum == 0.5 + 2.0 + 2.0 + 27.0
