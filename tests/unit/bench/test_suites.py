"""The suites: shapes, kernels selected by word, and versions that run only when named."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.prefix.attend import PrefixBackend
from mla_var3.bench import suites
from mla_var3.bench.contenders import PREFIX_KERNEL, prefix_contender
from mla_var3.bench.predict import predict_case
from mla_var3.bench.record import ABSENT, OK
from mla_var3.bench.run import BenchOptions, build_cases, chosen_shapes
from mla_var3.bench.suites import Case, SharedTokens
from mla_var3.conf.devices import device_spec
from mla_var3.conf.models import models
from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from mla_var3.op.mla.cache_formats import FORMATS
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.paths import KernelId
from tests.unit.attention.attention_support import registered

MANY = [KernelId("flash_mla", number, "cutile-dsl", "mla") for number in (0, 2, 10)]
MANY += [KernelId(name, 0, "cutile-dsl", "mla") for name in ("flash_attention", "mla_var6_plus")]
MANY.append(KernelId("flash_mla", 1, "cute-dsl", "mla"))
CUTILE = [kernel for kernel in suites.mla_kernels() if kernel.language == "cutile-dsl"]


def cases_of(suite: str, **options: Any) -> list[Case]:
    cases, missing = build_cases(BenchOptions(suite=suite, **options))
    assert missing == {}
    return cases


def test_kernels_and_backends_are_selected_by_word():
    def names(*words: str) -> list[str]:
        return [k.full_name for k in suites.select_kernels(words, MANY)]

    newest_names = ["flash_attention", "flash_mla_v1", "flash_mla_v10", "mla_var6_plus"]
    assert [k.full_name for k in suites.newest(MANY)] == newest_names
    assert len(names("all")) == len(MANY)
    assert names("flash_mla_v2") == ["flash_mla_v2"] and names("flash_mla_v0") == ["flash_mla"]
    assert len(names("flash_mla")) == 4
    assert names("latest", "flash_mla_v2").count("flash_mla_v2") == 1
    with pytest.raises(UnknownNameError, match="did you mean 'flash_mla_v2'"):
        names("flash_mla_v3")
    assert suites.select_backends(()) == (("cutile-dsl", "cute-dsl"), suites.PEERS)
    assert suites.select_backends(("sdpa", "cute-dsl")) == (("cute-dsl",), ("sdpa",))
    assert suites.select_backends(("peers",)) == ((), suites.PEERS)
    with pytest.raises(UnknownNameError, match="did you mean 'flashmla'"):
        suites.select_backends(("flashmls",))


def test_all_takes_every_version_at_one_shape_and_the_sweep_all_sizes(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(suites, "mla_kernels", lambda: list(MANY))
        (case,) = cases_of("all", sizes={"t": (512,)})
    assert case.problem == replace(suites.COMMON, t=512)
    assert [choice.kernel for choice in case.kernels] == sorted(MANY)
    assert case.peers == tuple(name for name in suites.PEERS if name not in suites.EIGHT_BIT_PEERS)
    sizes = {"b": (1, 2), "s": (4,), "t": (64, 128), "h": (16, 128)}
    assert len({case.problem for case in cases_of("sweep", sizes=sizes)}) == 8
    for changes, message in (
        ({"sizes": {"s": ()}}, "s: expected some values"),
        ({"cache_dtype": ("fp4",)}, "cache_dtype: expected fp8_per_token or fp8 or"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            BenchOptions(suite="sweep", **changes)


def test_special_versions_take_part_only_by_name():
    kernels = suites.mla_kernels()
    special = {k for k in kernels if (k.full_name, k.language) in suites.SPECIAL}
    assert {k.full_name for k in special} == {"mla_var6_plus_v5", "mla_var6_plus_v6"}
    for word in ("all", "latest", "mla_var6_plus"):
        chosen = suites.select_kernels([word], kernels)
        assert chosen and not set(chosen) & special
    assert special & set(suites.select_kernels(["mla_var6_plus_v5"], kernels))
    # Their old numbers, where no other language has them.
    hopper = [k for k in kernels if k.language == "cute-dsl"]
    assert set(suites.select_kernels(["mla_var6_plus_v2", "mla_var6_plus_v3"], hopper)) == special


def test_the_mix_stands_beside_both_pure_paths():
    *mixes, shared = suites.mix_cases(suites.mla_kernels(), ["fa3_qv", "fa3", "sdpa"])
    for case in mixes:
        names = [choice.kernel.full_name for choice in case.kernels]
        assert names[:3] == ["mla_var6_plus", "flash_mla", "flash_attention"]
        assert case.peers == ("fa3_qv", "fa3")
    eight_bit = [c for c in mixes if c.kernels[-1].kernel.full_name == "mla_var6_plus_v5"]
    assert eight_bit and all(c.kernels[-1].fields == {"n": c.problem.t} for c in eight_bit)
    assert tuple(getattr(shared.problem, name) for name in "bsth") == suites.PREFIX_SHAPE
    assert shared.kernels[0].fields == {"prefix": suites.PREFIX}
    assert shared.peers == ("fa3_qv",)
    assert all(not case.kernels for case in suites.mix_cases(CUTILE, ["fa3_qv"]))


def test_shared_prefixes_stand_beside_copies():
    *single, nothing, grouped = suites.prefix_cases(suites.mla_kernels(), ["fa3_qv", "sdpa"])
    assert {case.problem.b for case in single} == {16, 64, 256, 1024}
    for case in single:
        (prefix,) = case.shared.tokens
        assert case.shared.members == case.problem.b and 0 < prefix < case.problem.t
        assert case.peers == ("fa3_qv",)
        names = [(choice.kernel.full_name, dict(choice.fields)) for choice in case.kernels]
        assert names == [("mla_var6_plus_v6", {"prefix": prefix}), ("flash_mla", {})]
    for case in (nothing, grouped):  # one prefix at most is decompressed
        assert [choice.kernel.full_name for choice in case.kernels] == ["flash_mla"]
    assert grouped.problem.b == 64 == grouped.shared.members * len(grouped.shared.tokens)
    assert min(grouped.problem.lengths) == 2148 and max(grouped.problem.lengths) == 20384
    assert all(not c.kernels and c.shared is None for c in suites.prefix_cases(CUTILE, ["fa3_qv"]))
    for device, status in (("H200", OK), ("B200", ABSENT)):
        rows = {row.kernel: row for row in predict_case(grouped, device_spec(device), {})}
        assert rows[PREFIX_KERNEL].status == status
    # Where nothing is shared the latent kernel runs, on pages as well.
    rows = {row.label: row for row in predict_case(nothing, device_spec("H200"), {})}
    dense, paged = "flash_mla (cute-dsl)", "flash_mla (cute-dsl) prefix=0"
    assert not any(label.startswith(PREFIX_KERNEL) for label in rows)
    assert rows[dense].time_us == rows[paged].time_us


@pytest.mark.parametrize(("tokens", "kernel"), [((130, 64), PREFIX_KERNEL), ((0, 0), "flash_mla")])
def test_the_prefix_contender_is_named_for_what_runs_and_checked(tokens, kernel):
    """Its passes in PyTorch, on the CPU."""
    backend: Any = PrefixBackend(TorchTiled()) if any(tokens) else TorchTiled()
    backend.kernel, backend.language = kernel, "cute-dsl"
    problem = MlaProblem(b=4, s=2, t=200, h=2, lengths=(200, 150, 160, 70))
    with registered(backend):
        contender = prefix_contender(problem, SharedTokens(2, tokens), "cpu")
        assert (contender.kernel, contender.language) == (kernel, "cute-dsl")
        ready = contender.build()
        assert ready.check() < 0.01 and ready.path == "latent"
    copied = flash_mla_cost(problem)
    assert ready.cost.flops == copied.flops
    assert (ready.cost.bytes < copied.bytes) == any(tokens)
    with pytest.raises(UnsupportedError, match="flash_mla_prefix: expected whole pages"):
        prefix_contender(problem, SharedTokens(4, (40,)), "cpu").build()


def test_the_figures_have_their_shapes_newest_versions_and_a_mix_without_a_window():
    cases = suites.figures_cases(MANY, suites.PEERS)
    shapes = [(c.problem.b, c.problem.s, c.problem.t, c.problem.causal) for c in cases]
    assert shapes[:3] == [(8, 16, 4096, True), (2, 1024, 4096, False), (2, 1024, 4096, True)]
    assert shapes[3:] == [(4, 1, 32768, True), *((32, s, 4096, True) for s in (16, 32, 64))]
    found = [(choice.kernel.full_name, dict(choice.fields)) for choice in cases[-1].kernels]
    for wanted in (("mla_var6_plus", {}), ("mla_var6_plus", {"n": 0}), ("flash_mla_v10", {})):
        assert wanted in found
    assert ("flash_mla_v2", {}) not in found


def test_the_models_suite_has_every_model_once():
    cases = cases_of("models", quick=True)
    problems = [case.problem for case in cases]
    assert len(set(problems)) == len(problems)
    for model in models().values():
        for tp in (1, 4 if model.heads % 8 else 8):
            sizes = model.sizes(tp)
            [case] = [c for c in cases if {n: getattr(c.problem, n) for n in sizes} == sizes]
            assert case.problem.b * -(-case.problem.s * case.problem.h // 64) >= 32
            assert bool(case.peers) is ((sizes["k"], sizes["p"]) == (512, 64))
            assert [choice.fields for choice in case.kernels] == [{"page": 64}]
    assert len(cases_of("models")) == 3 * len(cases)


def test_the_engine_suite_reads_scattered_pages():
    cases = cases_of("engine", quick=True, sizes={"h": (8,)})
    sizes = {(c.problem.b, c.problem.h, c.problem.t, c.problem.s) for c in cases}
    assert sizes == {(b, 8, 4096, s) for b in (16, 64) for s in (1, 4)}
    for case in cases:
        assert [(c.kernel.full_name, c.fields["page"]) for c in case.kernels] == [("flash_mla", 64)]
        assert case.peers == ("flashmla", "fa3_qv", "flashinfer")
    assert len(cases_of("engine")) == 144
    other = cases_of("engine", quick=True, dtype="float16", widths={"d": 192, "v": 256})
    assert {(c.problem.dtype, c.problem.v) for c in other} == {("float16", 256)}
    # Only some shapes of a suite.
    cases = cases_of("prefix")
    assert chosen_shapes(cases, (9, 2)) == [cases[1], cases[8]]
    assert chosen_shapes(cases, ()) == cases
    with pytest.raises(InvalidArgumentError, match="shapes: expected numbers from 1 to 13, sha"):
        chosen_shapes(cases, (14,))


def test_8_bit_caches_take_part_when_asked_for():
    sweep = partial(cases_of, "sweep", sizes={"s": (1,), "t": (512,)})
    (case,) = sweep()
    assert case.cache_dtypes == () and not set(suites.EIGHT_BIT_PEERS) & set(case.peers)
    formats = ("fp8_per_token", "fp8")
    (case,) = sweep(cache_dtype=formats)
    assert set(case.cache_dtypes) == set(product(formats, ("cute-dsl", "cutile-dsl")))
    assert set(suites.EIGHT_BIT_PEERS) < set(case.peers)
    # The peer reads the other format.
    (case,) = sweep(cache_dtype=("fp8_per_token",), backends=("cutile-dsl", "peers"))
    assert case.cache_dtypes == (("fp8_per_token", "cutile-dsl"),)
    assert not set(suites.EIGHT_BIT_PEERS) & set(case.peers)
    (case,) = sweep(cache_dtype=("fp8_ds_mla",))
    assert case.cache_dtypes == (("fp8_ds_mla", "cutile-dsl"),)
    case = replace(case, cache_dtypes=(("fp8", "cute-dsl"), *case.cache_dtypes))
    predicted = predict_case(case, device_spec("B200"), {"device": "B200"})
    rows = {row.language: row for row in predicted if row.cache_dtype}
    assert rows["cute-dsl"].status == ABSENT and "written for sm_90" in rows["cute-dsl"].reason
    assert rows["cutile-dsl"].time_us is not None
    assert set(suites.EIGHT_BIT_CACHES["cutile-dsl"]) == set(FORMATS)
