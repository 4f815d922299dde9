"""Programs in processes of their own, forked from one that has torch already."""

import contextlib
import io
import os

import pytest
from ranks import forking


def pytest_alone(arguments):
    """pytest with the plugins that the arguments name, whatever else is installed."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return pytest.main(arguments)


def forked(function, *arguments, folder):
    """Calls it in a folder, as a program that ends with a status: this, and what it printed."""
    own, theirs = (context := forking()).Pipe()
    process = context.Process(target=_call, args=(theirs, function, arguments, folder))
    process.start()
    theirs.close()
    found = own.recv()
    process.join()
    own.close()
    return found


def _call(connection, function, arguments, folder):
    os.chdir(folder)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = int(function(*arguments))
    connection.send((status, output.getvalue()))
