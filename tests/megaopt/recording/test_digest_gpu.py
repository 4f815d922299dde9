"""Digests within CUDA graphs, and of steps on a GPU."""

import pytest
import torch
from runs import MASTER, REMAINDERS, params_of, values

from megaopt import FusedAdam, digest_many
from megaopt.kernels.place import Place
from megaopt.recording.digest import Digester

pytestmark = pytest.mark.gpu

SHAPES = [(3, 4), (0,), (5000,), (300, 128)]
ALL = ("grad", "weight", "master_param", "exp_avg", "exp_avg_sq")
BLOCKS = {**MASTER, "exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
HALF = {**MASTER, "exp_avg_dtype": torch.float16}


def assert_digests(optimizer):
    for found in optimizer.digests:
        for place, quantity in enumerate(found.quantities):
            own = [
                {"grad": p.grad, "weight": p.detach(), **optimizer.state[p]}[quantity]
                for p in found.params
            ]
            assert torch.equal(found.lanes[:, place], digest_many(own)), quantity
            on_host = digest_many([each.cpu() for each in own])
            assert torch.equal(found.lanes[:, place].cpu(), on_host), quantity


@pytest.mark.parametrize("options", [MASTER, REMAINDERS, BLOCKS, HALF])
def test_a_captured_step_leaves_digests(options):
    params = [torch.nn.Parameter(values(shape, 1).bfloat16().cuda()) for shape in SHAPES]
    optimizer = FusedAdam(params, lr=0.1, capturable=True, **options)
    optimizer.record_digests(ALL)
    for param in params_of(optimizer):
        param.grad = torch.randn_like(param)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
        with torch.cuda.graph(graph, stream=stream):
            optimizer.step()
    for _ in range(3):
        for param in params:
            param.grad.normal_()
        graph.replay()
        assert_digests(optimizer)


def test_a_step_that_the_device_leaves_out_has_digests_of_what_stayed():
    params = [torch.nn.Parameter(values(shape, 1).bfloat16().cuda()) for shape in SHAPES]
    optimizer = FusedAdam(params, lr=0.1, capturable=True, nonfinite="skip", **MASTER)
    optimizer.record_digests(ALL)
    for bad in (0.0, torch.inf):
        for param in params:
            param.grad = torch.randn_like(param)
        params[0].grad[0, 0] += bad
        before = [param.clone() for param in params]
        optimizer.step()
        assert all(map(torch.equal, params, before)) == bool(bad)
        assert_digests(optimizer)


def test_a_captured_digester_reads_what_is_there():
    tensors = [values(shape, 2).cuda() for shape in SHAPES]
    digester, graph = Digester(tensors, [Place(0)] * len(tensors)), torch.cuda.CUDAGraph()
    digester(tensors)
    with torch.cuda.graph(graph):
        found = digester(tensors)
    for _ in range(2):
        for tensor in tensors:
            tensor.normal_()
        graph.replay()
        assert torch.equal(found[:, :2], digest_many(tensors))


def test_nothing_waits_for_the_device():
    tensors = [values(shape, 2).cuda() for shape in SHAPES]
    digest_many(tensors)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(2**31)
        digest_many(tensors)
        assert not torch.cuda.current_stream().query()
