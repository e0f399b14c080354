"""A row says what a reader of its figures should know: which modules flash clipping runs through vmap, and the cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpscope.comparison import Comparison
from dpscope.plain_text import render_plain
from dpscope.reports.export import to_records
from dpscope.reports.page.render import render_page
from dpscope.reports.report import Report, compare_results
from dpscope.reports.text import summary
from dpscope.results.schema import parse_result, result_for
from dpscope.results.store import UnreadableResult
from dpscope.trainers.base import TrainerSettings
from dpscope.trainers.flash import DPFlashClippingTrainer
from tests.unit.flash.layers.whole_units import whole
from tests.unit.trainers.refused_models import BATCH, WIDTH, Positions, Words, between


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.scale


class Patches(nn.Module):
    """A class token beside a convolution, as vision transformers have it: few parameters, much time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 4, 2, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, images):
        patches = self.patch(images).flatten(2).mT
        return torch.cat([self.token.expand(len(patches), -1, -1), patches], 1)


class Hooked(Positions):
    """Its positions cannot be followed: the hook might use them."""

    def add(self) -> None:
        super().add()
        self.register_forward_pre_hook(lambda module, args: None)


def notes_of(model, batch_size=BATCH):
    trainer = DPFlashClippingTrainer(model, lambda m, b: m(b), TrainerSettings(batch_size=batch_size))
    return trainer.notes()


def test_where_the_parameter_is_followed_there_is_nothing_to_tell():
    assert notes_of(Words()) == []
    assert notes_of(Positions()) == []
    assert notes_of(nn.Sequential(Patches(), nn.Linear(4, 500))) == []


def test_small_parameters_of_leaf_modules_cost_nothing_worth_a_word():
    assert notes_of(between(Scale)()) == []
    frozen = Positions()
    frozen.positions.requires_grad_(False)  # a frozen parameter does not take its module with it
    assert notes_of(frozen) == []


def test_a_layer_of_torch_without_a_rule_is_told_without_a_remedy_that_there_is_not():
    (note,) = notes_of(between(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))())
    assert "middle (LSTM)" in note["sentence"] and "flash clipping has no rule for LSTM" in note["sentence"]
    assert "To avoid it" not in note["sentence"]


@pytest.fixture
def noted(make_result):
    """Results of one size, of which the private one carries a note."""
    results = [make_result(), make_result(method="flash")]
    sentence = "the model itself (Net) runs sample by sample <b>"
    note = {"topic": "opaque modules", "sentence": sentence, "modules": [""]}
    return [results[0], parse_result(result_for(results[1].spec, notes=[note]).to_json())], sentence


def test_a_note_reaches_the_result_file_the_summary_the_page_and_the_records(noted, tmp_path):
    results, sentence = noted
    assert results[1].notes[0]["modules"] == [""]
    assert f"flash: {sentence}" in " ".join(render_plain(summary(Report.of(results))).split())
    assert f"flash: {sentence}" in " ".join(str(Comparison(results, tmp_path, [], [])).split())
    page = render_page(Report.of(results))
    assert "runs sample by sample &lt;b&gt;" in page
    assert "runs sample by sample <b>" not in page
    assert [record["notes"] for record in to_records(compare_results(results))] == [None, sentence]


def test_without_notes_there_is_no_column_for_them(make_result):
    assert "notes" not in to_records(compare_results([make_result()]))[0]


def test_a_result_whose_notes_are_none_is_not_read(make_result):
    text = make_result().to_json().replace('"notes": []', '"notes": ["x"]')
    with pytest.raises(UnreadableResult, match="damaged dpscope result"):
        parse_result(text)


def test_a_module_that_runs_by_sample_is_told_with_its_cost_once_it_has_run():
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            return x @ self.weight

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), whole(Mix()))
    losses = lambda m, b: m(b).flatten(1).mean(1)  # noqa: E731
    trainer = DPFlashClippingTrainer(model, losses, TrainerSettings(batch_size=BATCH))
    assert trainer.notes() == []
    trainer.train_step(torch.randn(BATCH, WIDTH))
    (note,) = trainer.notes()
    assert note["modules"] == ["1"] and "sample by sample" in note["sentence"]
