"""privacy.json of a checkpoint."""

from __future__ import annotations

import json

import pytest

from dpscope.errors import UserError
from dpscope.transformers.draws import PRIVACY_FILE, PrivacyRecord

RECORD = PrivacyRecord([(1.0, 0.25, 4)], "rdp", 1.0, 0.25, 2**62 + 1)


def test_what_is_saved_is_read_again(tmp_path):
    RECORD.save(tmp_path)
    assert PrivacyRecord.load(tmp_path) == RECORD


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "history": [[1, 2]]}'])
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / PRIVACY_FILE).write_text(text)
    with pytest.raises(UserError, match=r"no readable privacy\.json"):
        PrivacyRecord.load(tmp_path)


def test_another_version_is_refused(tmp_path):
    RECORD.save(tmp_path)
    saved = json.loads((tmp_path / PRIVACY_FILE).read_text())
    (tmp_path / PRIVACY_FILE).write_text(json.dumps({**saved, "version": 2}))
    with pytest.raises(UserError, match="version 2"):
        PrivacyRecord.load(tmp_path)
