"""The script of docs/how-to that a file's tests are of, and one run of it."""

import pytest
from how_to import script


@pytest.fixture(scope="module")
def how_to(request):
    return script(request.path.stem.removeprefix("test_"))


@pytest.fixture(scope="module")
def straight(how_to, tmp_path_factory):
    """What the script's main returns, and its folder, which it makes where it is missing."""
    folder = tmp_path_factory.mktemp("straight") / "not" / "there"
    return how_to.main(["--folder", str(folder)]), folder
