"""Single-threaded arithmetic here too."""

from tests.unit.model.conftest import one_thread  # noqa: F401  (a fixture, used by being there)
