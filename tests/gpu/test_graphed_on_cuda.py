"""Graphed steps on a GPU end in the weights of eager ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import DPFlashOptimizer, FlashEngine, make_graphed_step, pad_batch

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


def private(seed: int = 0, dropout: float = 0.0, optimizer=torch.optim.AdamW, clipping: str = "flat"):
    torch.manual_seed(seed)
    model = Network(dropout).cuda()
    engine = FlashEngine(model, max_grad_norm=0.5, clipping=clipping)
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


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
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
