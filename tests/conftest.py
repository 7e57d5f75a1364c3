import pytest


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `full` the cases of a test that its mark `quick(n)` leaves out."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("full"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        wanted = found[0].get_closest_marker("quick").args[0]
        chosen = {i * len(found) // wanted for i in range(wanted)}
        for i, item in enumerate(found):
            if i not in chosen:
                item.add_marker(pytest.mark.full)
