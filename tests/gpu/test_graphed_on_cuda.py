"""Graphed steps on a GPU end in the weights of eager ones."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpscope
from dpscope.errors import UserError
from dpscope.flash import DPFlashOptimizer, FlashEngine, make_graphed_step, pad_batch
from dpscope.trainers.base import load_trainer
from dpscope.trainers.modes import find_blocks
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.settings import TrainerSettings
from dpscope.workloads.configs import make_config
from dpscope.workloads.workload import build_workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDTH, CLASSES, SIZE = 64, 10, 16


class Network(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=dropout, batch_first=True)
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        h = self.block(self.table(ids))
        h = self.conv(h.mT).mT
        return self.head(self.norm(h).mean(1))


def private(
    seed: int = 0,
    dropout: float = 0.0,
    optimizer=torch.optim.AdamW,
    clipping: str = "flat",
    prepare=lambda model: model,
):
    torch.manual_seed(seed)
    model = Network(dropout).cuda()
    engine = FlashEngine(prepare(model), max_grad_norm=0.5, clipping=clipping)
    engine.clip.count_noise = lambda normal: 0.0  # of the adaptive rule: much, for batches of this size
    noise = torch.Generator().manual_seed(5)
    options = {"noise_multiplier": 1.0, "max_grad_norm": engine.max_grad_norm, "expected_batch_size": SIZE}
    inner = optimizer(model.parameters(), lr=1e-3)
    return model, DPFlashOptimizer(inner, engine=engine, generator=noise, **options)


def batches(count: int):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (
            torch.randint(50, (SIZE, 12), generator=generator).cuda(),
            torch.randint(CLASSES, (SIZE,), generator=generator).cuda(),
        )


def assert_same(first, second, tolerance=1e-5):
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic", "adaptive"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_500_poisson_steps_with_everything_end_in_the_weights_of_the_loop(optimizer, clipping):
    """Padding of two sizes, empty draws, logical batches, a schedule of the learning rate and of the bound."""
    steps = 500 if (optimizer, clipping) == (torch.optim.AdamW, "flat") else 60
    models = []
    for graphed in (False, True):
        model, opt = private(optimizer=optimizer, clipping=clipping)
        loss_of = lambda x, y, model=model: F.cross_entropy(model(x), y, reduction="sum") / SIZE  # noqa: E731
        step = make_graphed_step(loss_of, opt)
        draw = torch.Generator().manual_seed(2)
        for number, (x, y) in enumerate(batches(steps)):
            real = int(torch.randint(0, SIZE + 1, (), generator=draw))
            size = SIZE if real > SIZE // 2 else SIZE // 2
            given = pad_batch((x[:real], y[:real]), size) if real else (x[:0], y[:0])
            opt.original_optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number / 50)
            if clipping != "adaptive":  # which learns its bound
                opt.max_grad_norm = 0.5 + number / 1000
            opt.signal_skip_step(number % 5 == 3)
            if graphed:
                step(*given)
            else:
                loss_of(*given).backward()
                opt.step()
                opt.zero_grad()
        models.append(model)
    assert step.replays > steps // 2
    assert_same(*models)


def test_dropout_draws_the_masks_of_the_loop_and_others_in_each_replay():
    model, opt = private(dropout=0.5)
    step = make_graphed_step(lambda x, y: F.cross_entropy(model(x), y), opt)
    (x, y), *_ = batches(1)
    losses = {round(float(step(x, y)), 6) for _ in range(12)}
    assert len(losses) > 10


def test_bf16_autocast_and_norms_of_the_last_replay():
    model, opt = private()

    def loss(x, y):
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    step = make_graphed_step(loss, opt)
    for x, y in batches(10):
        step(x, y)
    assert opt.engine.norms.shape == (SIZE,)
    assert opt.engine.norms.isfinite().all()
    assert step.replays >= 4


def test_a_wait_for_the_device_in_the_loss_is_refused_by_name():
    model, opt = private()

    def loss(x, y):
        found = F.cross_entropy(model(x), y)
        return found * (1.0 if float(found) > 0 else 2.0)

    step = make_graphed_step(loss, opt)
    with pytest.raises(UserError, match="cannot be captured"):
        for x, y in batches(8):
            step(x, y)
    torch.cuda.synchronize()
    assert torch.rand(4, device="cuda").isfinite().all()  # the generator is not left in the capture


def whole(step):
    """Return the captures of a step whose update is in the graph."""
    return [captured for captured in step._captured.values() if captured.update is not None]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_noise_and_update_are_in_the_graph_where_the_optimizer_has_a_fused_one(optimizer):
    model, opt = private(optimizer=optimizer)
    step = make_graphed_step(lambda x, y: F.cross_entropy(model(x), y), opt)
    for x, y in batches(8):
        step(x, y)
    assert bool(whole(step)) == (optimizer is not torch.optim.RMSprop)


def test_every_replay_adds_noise_of_its_own_and_one_without_a_key_leaves_nan():
    model, opt = private(optimizer=torch.optim.SGD)
    opt.noise.generator = None  # keys of the operating system
    opt.noise_multiplier = 100.0
    step = make_graphed_step(lambda x, y: F.cross_entropy(model(x), y), opt)
    (x, y), *_ = batches(1)
    moved = []
    for _ in range(12):
        before = model.block.linear1.weight.detach().clone()
        step(x, y)
        moved.append((model.block.linear1.weight.detach() - before).flatten())
    alike = torch.corrcoef(torch.stack(moved)) - torch.eye(12, device="cuda")
    assert step.replays >= 6
    assert float(alike.abs().max()) < 0.1
    whole(step)[0]._replay()
    assert model.block.linear1.weight.isnan().all()


def test_a_learning_rate_a_noise_multiplier_and_loaded_state_take_effect_in_the_next_replay():
    models = []
    for graphed in (False, True):
        model, opt = private()
        loss_of = lambda x, y, model=model: F.cross_entropy(model(x), y)  # noqa: E731
        step = make_graphed_step(loss_of, opt)
        saved = None
        for number, (x, y) in enumerate(batches(24)):
            opt.original_optimizer.param_groups[0]["lr"] = 1e-3 * (1 + number % 3)
            opt.noise_multiplier = 0.0 if number == 18 else 1.0 + number % 2
            if number == 6:
                saved = {key: value for key, value in opt.original_optimizer.state_dict().items() if key != "dpscope"}
            if number == 13:
                opt.original_optimizer.load_state_dict(saved)
            if graphed:
                step(x, y)
            else:
                loss_of(x, y).backward()
                opt.step()
                opt.zero_grad()
        models.append(model)
    assert step.replays > 8
    assert_same(*models)


def compiled(model):
    return torch.compile(model)


def compiled_by_block(model):
    model.block.compile()
    return model


@pytest.mark.parametrize("compile_it", [compiled, compiled_by_block])
def test_a_compiled_model_in_the_graph_ends_in_the_weights_of_the_compiled_loop(compile_it):
    models = []
    for graphed in (False, True):
        torch._dynamo.reset()
        given = []
        model, opt = private(prepare=lambda model, given=given: given.append(compile_it(model)) or given[0])
        loss_of = lambda x, y, given=given: F.cross_entropy(given[0](x), y)  # noqa: E731
        step = make_graphed_step(loss_of, opt)
        for x, y in batches(20):
            if graphed:
                step(x, y)
            else:
                loss_of(x, y).backward()
                opt.step()
                opt.zero_grad()
        models.append(model)
    assert step.replays > 8
    assert whole(step)
    assert_same(*models, tolerance=1e-4)


@pytest.mark.parametrize("method", ["standard", "flash"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_compiled_blocks_that_are_given_masks_in_captures_alone_are_captured(method, model):
    """transformers makes a causal mask while a graph is captured, and none in an eager pass."""
    torch._dynamo.reset()
    workload = build_workload(make_config(f"hf:{model}-tiny"), batch_size=4, seq_len=16)
    blocks = find_blocks(module := workload.model().cuda())
    for block in blocks:
        block.compile()
    settings = TrainerSettings(batch_size=4, cuda_graph=True)
    trainer = load_trainer(resolve_method(method))(module, workload.loss, settings)
    batch = workload.batch(0, torch.device("cuda"))
    losses = [trainer.train_step(batch) for _ in range(6)]
    assert all(map(math.isfinite, losses))
    assert losses[-1] != losses[0]


def test_a_model_compiled_with_graphs_of_its_own_is_refused_by_name():
    given = []
    _, opt = private(prepare=lambda model: given.append(torch.compile(model, mode="reduce-overhead")) or given[0])
    step = make_graphed_step(lambda x, y: F.cross_entropy(given[0](x), y), opt)
    with pytest.raises(UserError, match="cannot be captured"):
        for x, y in batches(12):
            step(x, y)
    torch.cuda.synchronize()


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"clipping": "per_layer"}, {"compile": "default"}])
def test_graphed_steps_are_exact_and_neighbours_are_held(settings):
    from dpscope.workloads.workload import build_workload

    workload = build_workload(dpscope.make_config("tiny"), batch_size=4, seq_len=16)
    found = dpscope.check(
        workload, ["flash"], cuda_graph=True, device="cuda", neighbours="compile" not in settings, **settings
    )
    assert found.ok, found


@pytest.mark.parametrize("method", ["standard", "flash"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_graphed_rows_train_as_eager_ones(method, accumulate):
    from dpscope.runner.spec import RunSpec
    from dpscope.runner.steps import assemble

    models = []
    for graphed in (False, True):
        common = {"batch_size": 4, "seq_len": 16, "device": "cuda", "accumulate": accumulate, "cuda_graph": graphed}
        spec = RunSpec(workload=dpscope.make_config("tiny"), method=method, **common)
        trainer, given = assemble(spec)
        for _ in range(8):
            trainer.train_step(*given)
        models.append(trainer.plain_model)
    assert_same(*models)


@pytest.mark.parametrize("method", ["standard", "flash"])
@pytest.mark.parametrize("instrument", ["time", "memory", "trace"])
def test_every_instrument_sees_graphed_rows(tmp_path, instrument, method):
    from dpscope.runner.measurements import memory, time, trace
    from dpscope.runner.spec import RunSpec

    measure = {"time": time.measure_time, "memory": memory.measure_memory, "trace": trace.measure_trace}[instrument]
    common = {"batch_size": 4, "seq_len": 16, "device": "cuda", "cuda_graph": True, "steps": 3, "warmup": 1}
    spec = RunSpec(workload=dpscope.make_config("tiny"), method=method, instrument=instrument, **common)
    found = measure(spec, lambda *_: None, tmp_path)
    assert found.ok
    if instrument == "trace":
        assert found.trace["gpu"]["busy_ms"] > 0
    else:
        assert found.peak_memory_mb > 1
