"""`megaopt ranks bench`: the whole path on a CPU over gloo, the model of growth, messages."""

import json

import pytest
import torch

from megaopt.commands.bench.sets import TensorSet
from megaopt.commands.ranks import bench, llama
from megaopt.commands.ranks.growth import Speeds, Work, most_of, predicted_ms, sent, speeds_of
from megaopt.commands.ranks.subjects import ENTRIES, SETS, work_of

TINY = {
    "L": TensorSet.of_shapes("L", "two matrices", [(40, 24), (24, 40)]),
    "G": TensorSet.of_shapes("G", "two small ones", [(24, 8), (7, 24)]),
    "E": TensorSet.of_shapes("E", "four experts", [(4, 16, 8)]),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """Two processes over gloo in the place of cards, and tiny sets."""
    monkeypatch.setattr(bench, "hardware", lambda: ("cpu", 2))
    monkeypatch.setattr(bench, "SETS", TINY)
    size = llama.Size(layers=1, width=48, vocabulary=64, tokens=8)
    question = bench.question_of
    tiny = lambda *given: bench.replace(question(*given), size=size, speed_bytes=2**16)  # noqa: E731
    monkeypatch.setattr(bench, "question_of", tiny)


def test_the_whole_path_on_a_cpu(megaopt, tmp_path, on_cpu):
    status, out, err = megaopt("ranks", "bench", "--repetitions=2")
    print(out)
    assert (status, err) == (0, "")
