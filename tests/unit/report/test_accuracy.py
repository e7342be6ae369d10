"""Errors of the 8-bit cache formats, and the command that shows them."""

import json

import pytest
import torch

from mla_var3.cli.main import main
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cache_formats import PER_TOKEN, dequantise, quantise
from mla_var3.report import accuracy
from mla_var3.report.accuracy import CACHES, Latents, measure, read_latents


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_TILE", 128)
    monkeypatch.setattr(accuracy, "QUICK_TOKENS", (64, 300))


def test_tiles_give_what_one_softmax_gives(generator):
    latent, rope = (torch.randn(300, width, generator=generator) for width in (256, 64))
    queries = torch.randn(5, 320, generator=generator) * 0.2
    own = Latents("own", latent, rope, queries)
    short, row = measure(own, (50, 300))
    assert short.t == 50 and short.errors == measure(own, (50,))[0].errors

    def attend(rows: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = queries.double() @ torch.cat([rows, keys], dim=-1).mT
        return scores.softmax(-1) @ rows, scores.logsumexp(-1)

    output, lse = attend(latent.double(), rope.double())
    stored = quantise(latent.bfloat16(), rope.bfloat16(), PER_TOKEN)
    found, found_lse = attend(*dequantise(stored, torch.float64))
    error = row.errors["fp8_per_token"]
    assert error.output == pytest.approx(float((found - output).norm() / output.norm()), rel=1e-9)
    assert error.lse == pytest.approx(float((found_lse - lse).abs().max()), rel=1e-9)


def test_the_errors_are_those_of_the_formats(generator):
    flat, peaky = (row.errors for row in measure(Latents("normal"), (300,)))
    assert list(flat) == list(CACHES)
    assert flat["bfloat16"].channels < 0.004
    for name in CACHES[1:]:
        # e4m3 rounds by 2.6 % on average; peaky attention adds the error of the scores.
        assert 0.015 < flat[name].channels < 0.04 < peaky[name].channels < 0.2
    hot = measure(Latents("hot channel"), (300,))[1].errors["fp8_per_token"]
    assert hot.output < 0.5 * hot.channels
    saturated = measure(Latents("normal"), (300,), scale=0.001)[0].errors
    assert saturated["fp8"].output > 0.4
    assert saturated["fp8_per_token"] == flat["fp8_per_token"]
    # A channel that is always zero has no error.
    latent, rope = (torch.randn(64, width, generator=generator) for width in (512, 64))
    latent[:, 3] = 0.0
    for row in measure(Latents("given", latent, rope), [64]):
        assert all(0.0 < error.channels < 0.2 for error in row.errors.values())


def test_a_kernel_has_columns_of_its_own(generator):
    """PyTorch in the place of the kernel: the error of the format, and that of bfloat16."""
    assert accuracy.kernel_here() is None  # no GPU
    for row in measure(Latents("normal"), (130, 300), kernel="torch_tiled", device="cpu"):
        assert list(row.errors) == [*CACHES, "fp8_per_token kernel", "fp8 kernel"]
        for name in ("fp8_per_token", "fp8"):
            alone, kernel = row.errors[name], row.errors[f"{name} kernel"]
            assert kernel.output == pytest.approx(alone.output, rel=0.2) and kernel != alone
    narrow = Latents("own", *(torch.randn(9, width, generator=generator) for width in (256, 64)))
    assert list(measure(narrow, (9,), kernel="torch_tiled", device="cpu")[0].errors) == list(CACHES)


ONE = {"latent": torch.ones(1, 4), "rope": torch.ones(1, 2)}


def test_wrong_files(tmp_path):
    for contents, message in (
        (torch.zeros(3), "latents: expected a dict with latent"),
        ({"latent": torch.zeros(3, 4)}, "latents: expected a dict with latent"),
        (ONE | {"rope": torch.zeros(2, 4)}, "rope: expected as many tokens"),
        (ONE | {"rope": torch.zeros(3)}, "rope: expected a matrix"),
        (ONE | {"queries": torch.ones(1, 5)}, r"queries: expected \[rows, 6\]"),
        (ONE | {"queries": torch.ones(0, 6)}, r"queries: expected \[rows, 6\], at least one row"),
        (ONE | {"latent": torch.full((1, 4), torch.nan)}, "latent: expected finite numbers"),
    ):
        torch.save(contents, tmp_path / "latents.pt")
        with pytest.raises(InvalidArgumentError, match=message):
            read_latents(tmp_path / "latents.pt")


def test_the_command(tmp_path, capsys, monkeypatch, generator):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["accuracy", "--quick", "--out_dir", str(tmp_path / "made")]) == 0
    out = capsys.readouterr().out
    table = out[: out.index("written")]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 80
    assert "heavy-tailed" in table and "fp8_per_token" in table
    files = {path.name for path in (tmp_path / "made").iterdir()}
    assert {"accuracy.json", "accuracy.md", "accuracy.svg"} <= files
    record = json.loads((tmp_path / "made" / "accuracy.json").read_text())
    assert len(record["rows"]) == 3 * 2 * 2
    # Given latents.
    file = tmp_path / "layer3.pt"
    # fp8_ds_mla takes multiples of 128 columns only.
    parts = {"latent": torch.randn(70, 192, generator=generator), "rope": torch.ones(70, 64)}
    torch.save(parts, file)
    assert main(["accuracy", "--latents", str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = [(row["latents"], row["attention"], row["t"]) for row in rows]
    assert found == [("layer3", "flat", 70), ("layer3", "peaky", 70)]
    assert "fp8_ds_mla" not in rows[0]["errors"]
    assert main(["accuracy", "--latents", str(tmp_path / "none.pt")]) == 1
    (tmp_path / "bad.pt").write_text("no tensors")
    assert main(["accuracy", "--latents", str(tmp_path / "bad.pt")]) == 2
    assert "latents: expected a file of torch.save" in capsys.readouterr().err
