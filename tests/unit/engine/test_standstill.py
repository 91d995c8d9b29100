"""A clock that stops; by hand."""

from common.engine.standstill import Standstill


def test_time_passes_but_while_it_stands_still() -> None:
    clock = Standstill()
    assert clock.read(5.0) == 5.0
    clock.begin(10.0)
    clock.begin(12.0)  # stands already
    assert [clock.read(now) for now in (10.0, 25.0)] == [10.0, 10.0]
    clock.end(40.0)
    clock.end(41.0)  # goes already
    assert [clock.read(now) for now in (41.0, 43.0)] == [11.0, 13.0]
    clock.begin(44.0)
    clock.end(46.0)
    assert clock.read(46.0) == 14.0
