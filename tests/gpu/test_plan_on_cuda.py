"""Plans on a GPU: probes, their processes, and the largest physical batch of a training loop."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine
from dpscope.forecast.cards import find_card
from dpscope.forecast.physical_batch import find_physical_batch
from dpscope.forecast.plan import plan
from dpscope.forecast.probe import local_card, probe, probe_in_process
from dpscope.forecast.step import forecast_step
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import make_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GIB = 2**30


def test_a_search_that_runs_out_of_memory_leaves_a_loop_that_trains():
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2 * GIB / torch.cuda.get_device_properties(0).total_memory)
    try:
        model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.Linear(1024, 2)).cuda()
        data = TensorDataset(torch.randn(64, 1024).cuda(), torch.randint(2, (64,)).cuda())
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            data_loader=DataLoader(data, batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )

        def loss(batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        size = find_physical_batch(loss, next(iter(loader)), optimizer=optimizer, most=10**6)
        assert 1000 < size < 10**6
        for x, y in loader:
            optimizer.zero_grad()
            loss((x, y)).backward()
            optimizer.step()
        repeated = torch.arange(size, device="cuda") % 64  # the batch that was found does train
        loss((data.tensors[0][repeated], data.tensors[1][repeated])).backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("method", ["standard", "flash"])
@pytest.mark.parametrize("compiled", ["none", "default"])
def test_a_probed_plan_is_as_the_step_itself(method, compiled):
    config = make_config("small", num_layers=2)
    wish = {
        "methods": [method],
        "seq_len": 256,
        "card": local_card(),
        "batch_size": 32,
        "logical_batch": 32,
        "effects": False,
    }
    found = plan(config, prober=probe_in_process, settings={"dtype": "bf16", "compile": compiled}, **wish)
    (row,) = json.loads(json.dumps(found))["methods"]
    spec = RunSpec(
        workload=config,
        method=method,
        dtype="bf16",
        compile=compiled,
        batch_size=32,
        seq_len=256,
        device="cuda",
    )
    (measured,) = probe([spec])
    assert row["step"]["peak_bytes"] == pytest.approx(measured.peak_bytes, rel=0.03)
    assert row["step"]["seconds"] == pytest.approx(measured.seconds, rel=0.5)  # the host sets the pace
    assert 0 < measured.gpu_seconds <= measured.seconds


def test_the_gpu_s_busy_time_grows_with_the_batch_even_if_the_host_is_slower():
    spec = RunSpec(workload=make_config("tiny"), method="standard", batch_size=8, seq_len=64, device="cuda")
    small, large = probe([replace(spec, batch_size=size) for size in (8, 512)])
    assert small.gpu_seconds < 0.7 * large.gpu_seconds


@pytest.mark.parametrize(("batch", "verifying"), [(2, True), (64, False)])
def test_the_peak_is_as_predicted_in_verification_and_in_a_step(batch, verifying):
    spec = RunSpec(
        workload=make_config("small"), method="flash", dtype="bf16", batch_size=batch, seq_len=256, device="cuda"
    )
    predicted = forecast_step(spec, find_card(local_card()), detailed=False)
    assert predicted.peaks_verifying == verifying
    (measured,) = probe([spec])
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)


def test_trainings_that_do_not_fit_together_are_probed_one_by_one():
    spec = RunSpec(workload=make_config("small"), method="standard", batch_size=8, seq_len=256, device="cuda")
    alone = probe([spec])[0].peak_bytes
    torch.cuda.set_per_process_memory_fraction(1.3 * alone / torch.cuda.get_device_properties(0).total_memory)
    try:
        assert [each.batch_size for each in probe([replace(spec, batch_size=4), spec])] == [4, 8]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
