"""The licence that a checkpoint's makers name."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from shardnet.checkpoint.licence import read_licence


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: 'tiny'\n---\n", "tiny"),
        ("---\nlicense:\n- mit\n---\n", ""),
        ("# A model\nlicense: mit\n---\n", ""),
        ("---\nlicense: mit\n", ""),
        ("", ""),
    ],
)
def test_of_a_folder_its_model_card_names_one(tmp_path: Path, card: str, licence: str) -> None:
    assert read_licence(tmp_path) == ""
    (tmp_path / "README.md").write_text(card)
    assert read_licence(tmp_path) == licence


def test_of_a_gguf_file_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("mit")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_licence(path) == "mit"
    path.write_bytes(path.read_bytes()[:40])
    assert read_licence(path) == ""
    assert read_licence(tmp_path / "none.gguf") == ""
